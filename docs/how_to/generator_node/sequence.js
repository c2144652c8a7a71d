// One completion on its way: thinking, interruption phrase, answer; and what a request must be before it is taken.
const crypto = require('crypto');
const { sample } = require('./policy.js');

// `bytes` of a message as numbers: little-endian, as this machine is. Copied, since they may begin at any byte.
const ids = (bytes) => new Int32Array(Uint8Array.from(bytes).buffer);

// Why this server could never serve a request; empty where it could.
function check(request, { maximum_tokens: most, slots, queue_capacity: queue, vocabulary }) {
  const { completions, sampling, interruption, group_id: name } = request;
  if (!sampling || !completions.length) return 'no completion is asked for, or no sampling is given';
  const places = slots + queue;
  if (completions.length > places) return `${completions.length} completions, slots and queue hold ${places}`;
  const bytes = [request.prompt_token_ids, sampling.stop_token_ids, interruption?.text_token_ids ?? '',
    interruption?.end_of_thinking_token_ids ?? ''];
  if (bytes.some((part) => part.length % 4)) return 'token ids that are not whole int32s';
  const [prompt, stops, phrase, ending] = request.lists = bytes.map(ids);
  const last = phrase.subarray(Math.max(0, phrase.length - ending.length));
  const within = (value, low, high) => value >= Math.fround(low) && value <= high; // false for NaN
  const budgets = completions.some((wanted) => wanted.thinking_budget);
  const wrong = [
    ['a group_id of more than 512 characters', name.length > 512],
    ['the prompt is empty, or leaves no room for a completion', !prompt.length || prompt.length >= most],
    ['a completion is asked for twice', new Set(completions.map((wanted) => wanted.index)).size < completions.length],
    ['temperature is not within 0.01 and 100', !within(sampling.temperature, 0.01, 100)],
    ['top_p is not within 1e-6 and 1', !within(sampling.top_p, 1e-6, 1)],
    ['the answer budget is 0', !sampling.answer_budget],
    ['the phrase does not end with end_of_thinking', `${last}` !== `${ending}`],
    ['a thinking budget without a phrase', budgets && !phrase.length],
    ['this server does not tell experts', request.router_replay],
    ['token ids outside the vocabulary', request.lists.some((list) => list.some((id) => id < 0 || id >= vocabulary))],
  ];
  return wrong.find(([, holds]) => holds)?.[0] ?? '';
}

// A number in [0, 1) that depends on seed and position alone: same seed, same weights, same request, same tokens.
const uniform = (seed, position) =>
  crypto.createHash('sha256').update(`${seed}/${position}`).digest().readUIntBE(0, 6) / 2 ** 48;

// Spans that are in order: the last one grows, or another one begins.
function cover(spans, at, fields = {}) {
  const last = spans.at(-1);
  if (last?.end === at && last.step === fields.step) last.end += 1;
  else spans.push({ ...fields, start: at, end: at + 1 });
}

class Sequence {
  constructor(call, wanted, { maximum_tokens: most }) {
    Object.assign(this, { call, wanted, tokens: [], logprobs: [], versions: [], forced: [], cache: null, finish: '' });
    const [prompt, , phrase] = call.request.lists;
    this.asked = performance.now();
    this.room = most - prompt.length; // tokens that it may have, forced ones included
    this.thinking = wanted.thinking_budget > 0 && phrase.length > 0;
    this.left = this.thinking ? wanted.thinking_budget : call.request.sampling.answer_budget; // sampled tokens
    this.phraseLeft = 0; // tokens of the phrase that are still to be fed
  }

  // One token by the weights held now. Keys and values of tokens fed before stay those of the weights of then.
  step(policy, server) {
    const { sampling, lists: [prompt, stops, phrase, ending] } = this.call.request;
    const { tokens } = this, at = tokens.length, forced = this.phraseLeft > 0;
    if (!this.cache) {
      this.began = performance.now();
      this.cache = policy.cache();
      for (const token of prompt.subarray(0, -1)) policy.feed(this.cache, token);
      server.prefill_tokens += prompt.length;
    }
    const logits = policy.logits(policy.feed(this.cache, tokens.at(-1) ?? prompt.at(-1)));
    const drawn = () => sample(logits, sampling, uniform(this.wanted.seed, at));
    const [token, logprob] = forced ? [phrase.at(-this.phraseLeft), 0] : drawn();
    tokens.push(token);
    this.logprobs.push(logprob);
    cover(this.versions, at, { step: server.version.step });
    server[forced ? 'forced_tokens' : 'sampled_tokens'] += 1;
    if (forced) {
      cover(this.forced, at);
      this.phraseLeft -= 1;
    } else {
      this.left -= 1;
      if (this.thinking) {
        const ended = ending.length > 0 && ending.every((id, i) => tokens.at(i - ending.length) === id);
        if (ended || !this.left) {
          Object.assign(this, { thinking: false, left: sampling.answer_budget, phraseLeft: ended ? 0 : phrase.length });
        }
      } else if (!this.left) this.finish = 'FINISH_REASON_LENGTH';
      if (stops.includes(token)) this.finish = 'FINISH_REASON_STOP';
    }
    if (tokens.length === this.room) this.finish ||= 'FINISH_REASON_LENGTH';
  }

  completion() {
    const { incarnation, group_id } = this.call.request, { versions, forced, finish: finish_reason } = this;
    return {
      incarnation, group_id, index: this.wanted.index, versions, forced, finish_reason,
      token_ids: Buffer.from(Int32Array.from(this.tokens).buffer),
      logprobs: Buffer.from(Float32Array.from(this.logprobs).buffer),
      queued_seconds: (this.began - this.asked) / 1000,
      sampling_seconds: (performance.now() - this.began) / 1000,
    };
  }
}

module.exports = { check, ids, Sequence };
