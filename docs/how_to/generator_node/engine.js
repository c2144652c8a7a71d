// Slots, the queue and the decode loop: who waits, who decodes, and when the weights are flipped.
const { setImmediate: turn, setTimeout: sleep } = require('timers/promises');
const { status } = require('@grpc/grpc-js');
const { check, Sequence } = require('./sequence.js');

class Engine {
  constructor(policy, server) {
    Object.assign(this, { policy, server });
    this.calls = new Set(); // of Generate that are not over
    this.waiting = []; // sequences without a slot
    this.running = new Set(); // sequences in slots
    this.staged = null; // a version that waits to be flipped in: { version, tensors, applied }
    this.steps = Infinity; // that may be taken, for tests that hold decoding up
  }

  generate(stream) {
    const { request } = stream, { server } = this, refuse = (code, details) => stream.emit('error', { code, details });
    const wrong = request.broken ?? check(request, server);
    if (wrong) return refuse(status.INVALID_ARGUMENT, wrong);
    const names = request.completions.map((wanted) => `${request.incarnation} ${wanted.index} ${request.group_id}`);
    for (const older of this.calls) {
      if (older.names.some((name) => names.includes(name))) this.end(older, status.ABORTED, 'asked for again');
    }
    if (this.stopping) return refuse(status.UNAVAILABLE, 'the server is shutting down');
    const { incarnation, step } = server.version, pinned = request._pinned_step && Number(request.pinned_step);
    if (request.incarnation !== incarnation || Number(request.minimum_step) > step || (pinned ?? step) !== step) {
      return refuse(status.FAILED_PRECONDITION, `step ${step} of incarnation ${incarnation} is held`);
    }
    if (this.waiting.length + this.running.size + names.length > server.slots + server.queue_capacity) {
      return refuse(status.RESOURCE_EXHAUSTED, 'the queue is full');
    }
    const call = { stream, request, names, left: names.length, pinned: pinned !== undefined };
    this.calls.add(call);
    stream.on('cancelled', () => this.end(call)); // the client hung up, or its deadline passed
    for (const wanted of request.completions) this.waiting.push(new Sequence(call, wanted, server));
  }

  end(call, code, details) { // with an error, or with none; what it has left loses its slots and places
    if (!this.calls.delete(call)) return;
    this.waiting = this.waiting.filter((sequence) => sequence.call !== call);
    for (const sequence of this.running) if (sequence.call === call) this.running.delete(sequence);
    if (code === undefined) call.stream.end();
    else call.stream.emit('error', { code, details });
  }

  stop() {
    this.stopping = true;
    for (const call of this.calls) this.end(call, status.UNAVAILABLE, 'the server is shutting down');
  }

  get mayFlip() { // requests pinned to the version held are finished first, unless another trainer has come
    if (!this.staged) return false;
    const another = this.staged.version.incarnation !== this.server.version.incarnation;
    return another || ![...this.calls].some((call) => call.pinned);
  }

  flip() { // all tensors or none
    const { version, tensors, applied } = this.staged, { server } = this, from = performance.now();
    this.policy.use(tensors);
    if (version.incarnation !== server.version.incarnation) {
      const why = `weights of incarnation ${version.incarnation} have arrived`;
      for (const call of this.calls) this.end(call, status.FAILED_PRECONDITION, why);
    }
    const pause = (performance.now() - from) / 1000;
    Object.assign(server, { version, versions_applied: server.versions_applied + 1 });
    server.pause_seconds += pause;
    this.staged = null;
    applied(pause);
  }

  async decode() {
    for (;;) {
      if (this.mayFlip) this.flip();
      while (this.waiting.length && this.running.size < this.server.slots) this.running.add(this.waiting.shift());
      if (!this.running.size || !this.steps) {
        await sleep(2);
        continue;
      }
      const from = performance.now();
      for (const sequence of this.running) {
        sequence.step(this.policy, this.server);
        if (sequence.finish) this.finish(sequence);
      }
      this.steps -= 1;
      this.server.busy_seconds += (performance.now() - from) / 1000;
      await turn(); // calls are answered between two steps
    }
  }

  finish(sequence) { // sent as soon as it is over
    const { call } = sequence;
    this.running.delete(sequence);
    call.stream.write(sequence.completion());
    call.left -= 1;
    if (!call.left) this.end(call);
  }
}

module.exports = { Engine };
