#!/usr/bin/env node
// A generator for scalerl-jax, written from rollout.proto: the four calls, health and reflection.
//
//   node generator.js --model=DIR --port=8500 [--slots=8] [--queue=16] [--maximum_tokens=512] [--sync_dtype=bfloat16]
//
// It listens on 127.0.0.1 only: every client that reaches it may replace its weights.
const crypto = require('crypto');
const fs = require('fs');
const path = require('path');
const { parseArgs } = require('util');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const { ReflectionService } = require('@grpc/reflection');
const { HealthImplementation } = require('grpc-health-check');
const { Engine } = require('./engine.js'); //     slots, queue, decode loop
const { readFolder } = require('./folder.js'); // what the model's folder says, as Status tells it
const { Policy } = require('./policy.js'); //     the decoder and its sampling
const { ids } = require('./sequence.js'); //      one completion: thinking, phrase, answer, spans
const { receive } = require('./weights.js'); //   PushWeights: chunks, deltas, digests

// The flags of scalerl-serve that tests and scripts give; compute_dtype and decode_chunk are taken and not looked at.
const named = ['model', 'port', 'port_file', 'proto', 'slots', 'queue', 'maximum_tokens', 'sync_dtype', 'compute_dtype',
  'decode_chunk'].map((name) => [name, { type: 'string' }]);
const switches = ['exit_with_parent', 'steps_from_stdin'].map((name) => [name, { type: 'boolean' }]);
const { values: flags } = parseArgs({ options: Object.fromEntries([...named, ...switches]) });

// What Status tells, under the names of the contract; the engine keeps the version and the counters.
const folder = readFolder(flags.model);
const server = {
  server_id: crypto.randomUUID(),
  engine: 'node',
  version: { incarnation: '0', step: 0 }, // of the weights in the folder
  model_config: folder.modelConfig,
  tokenizer_fingerprint: folder.fingerprint,
  compute_dtype: 'float32',
  head_dtype: 'float32',
  head_precision: 'default',
  sync_dtype: flags.sync_dtype ?? 'bfloat16',
  devices: 1,
  slots: Number(flags.slots ?? 8),
  queue_capacity: Number(flags.queue ?? 16),
  maximum_tokens: Math.min(Number(flags.maximum_tokens ?? 512), folder.config.max_position_embeddings ?? 32768),
  ...{ sampled_tokens: 0, forced_tokens: 0, prefill_tokens: 0, busy_seconds: 0, pause_seconds: 0 },
  ...{ versions_applied: 0, chunks_refused: 0, router_replay: false },
  ...{ shapes: folder.shapes, vocabulary: folder.config.vocab_size }, // for ourselves: no fields of the message
};
const policy = new Policy(folder.config, folder.tensors);
const engine = new Engine(policy, server);
const began = performance.now();

function status(_, answer) {
  const up_seconds = (performance.now() - began) / 1000;
  answer(null, { ...server, up_seconds, busy_slots: engine.running.size, queued: engine.waiting.length });
}

function score({ request }, answer) {
  const whole = !request.broken && request.token_ids.length % 4 === 0, tokens = whole ? ids(request.token_ids) : [];
  const fits = tokens.length && tokens.length <= server.maximum_tokens;
  if (!fits || tokens.some((token) => token < 0 || token >= server.vocabulary)) {
    return answer({ code: grpc.status.INVALID_ARGUMENT, details: request.broken ?? 'tokens that cannot be scored' });
  }
  answer(null, { logprobs: Buffer.from(policy.score(tokens).buffer), version: server.version });
}

const proto = flags.proto ?? path.join(__dirname, '../../../scalerl_jax/contract/rollout.proto');
const as = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const schema = protoLoader.loadSync(proto, as);
const { service } = grpc.loadPackageDefinition(schema).scalerl.v1.Rollout;
// Bytes that are no message are INVALID_ARGUMENT; grpc-js by itself says INTERNAL.
for (const method of Object.values(service)) {
  const read = method.requestDeserialize;
  method.requestDeserialize = (bytes) => {
    try { return read(bytes); } catch (error) { return { broken: error.message }; }
  };
}

const listener = new grpc.Server({ 'grpc.max_receive_message_length': 2 ** 24 + 2 ** 16 }); // a chunk and its envelope
listener.addService(service, {
  Status: status,
  Generate: (stream) => engine.generate(stream),
  PushWeights: (stream) => receive(stream, server, (version) => { engine.staged = version; }),
  Score: score,
});
const health = new HealthImplementation({ '': 'SERVING', 'scalerl.v1.Rollout': 'SERVING' });
health.addToServer(listener);
new ReflectionService(schema).addToServer(listener);

function stop() { // finishes nothing: a trainer asks for it elsewhere
  for (const name of ['', 'scalerl.v1.Rollout']) health.setStatus(name, 'NOT_SERVING');
  engine.stop();
  setTimeout(() => process.exit(0), 300); // what is being written may still go out
}

listener.bindAsync(`127.0.0.1:${flags.port ?? 8500}`, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`server ${server.server_id} at 127.0.0.1:${port}`);
  if (!flags.port_file) return;
  fs.writeFileSync(`${flags.port_file}.new`, `${port}\n`);
  fs.renameSync(`${flags.port_file}.new`, flags.port_file); // whole, or not there
});
process.on('SIGTERM', stop).on('SIGINT', stop);
if (flags.exit_with_parent) process.stdin.on('end', stop).resume();
if (flags.steps_from_stdin) { // for tests: a number a line, of decode steps that may be taken from now on, and no more
  process.stdin.on('data', (lines) => {
    for (const line of String(lines).trim().split('\n')) {
      engine.steps = (Number.isFinite(engine.steps) ? engine.steps : 0) + Number(line);
    }
  });
}
engine.decode();
