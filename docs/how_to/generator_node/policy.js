// The decoder of Qwen 3, Qwen 2 and Llama in float32, one token at a time, and sampling from its logits.

// weight [out, in] row-major, times x [in]; sums in double precision.
function multiply(weight, x, bias) {
  const out = new Float32Array(weight.length / x.length);
  for (let o = 0, w = 0; o < out.length; o++) {
    let sum = bias ? bias[o] : 0;
    for (let i = 0; i < x.length; i++) sum += weight[w++] * x[i];
    out[o] = sum;
  }
  return out;
}

// RMSNorm of each stretch of x that is as long as `scale`.
function norm(x, scale, epsilon) {
  const out = new Float32Array(x.length), n = scale.length;
  for (let start = 0; start < x.length; start += n) {
    let squares = 0;
    for (let i = 0; i < n; i++) squares += x[start + i] ** 2;
    for (let i = 0; i < n; i++) out[start + i] = (x[start + i] / Math.sqrt(squares / n + epsilon)) * scale[i];
  }
  return out;
}

const add = (x, y) => x.map((value, i) => value + y[i]);

class Policy {
  // config: of config.json, every size given. tensors: Hugging Face name -> Float32Array
  constructor(config, tensors) {
    this.config = config;
    const half = config.head_dim / 2, round = Math.fround; // as float32 libraries round it
    this.frequencies = Float32Array.from({ length: half }, (_, i) => 1 / round(config.rope_theta ** round(i / half)));
    this.use(tensors);
  }

  use(tensors) { this.weights = tensors; }

  cache() { return Array.from({ length: this.config.num_hidden_layers }, () => []); } // [key, value] of each token fed

  rotate(x, position) { // the halves of each head, in place
    const half = this.frequencies.length;
    for (let start = 0; start < x.length; start += 2 * half) {
      for (let i = 0; i < half; i++) {
        const angle = Math.fround(position * this.frequencies[i]), cos = Math.cos(angle), sin = Math.sin(angle);
        const [a, b] = [x[start + i], x[start + half + i]];
        [x[start + i], x[start + half + i]] = [a * cos - b * sin, b * cos + a * sin];
      }
    }
    return x;
  }

  attend(query, rows) { // a query head shares the key/value head of its group
    const { head_dim: size, num_attention_heads: heads, num_key_value_heads: groups } = this.config;
    const out = new Float32Array(query.length);
    for (let head = 0; head < heads; head++) {
      const q = head * size, k = Math.floor(head / (heads / groups)) * size;
      const scores = rows.map(([key]) => {
        let sum = 0;
        for (let i = 0; i < size; i++) sum += query[q + i] * key[k + i];
        return sum / Math.sqrt(size);
      });
      const most = scores.reduce((a, b) => Math.max(a, b)), weights = scores.map((score) => Math.exp(score - most));
      const total = weights.reduce((a, b) => a + b);
      rows.forEach(([, value], t) => {
        for (let i = 0; i < size; i++) out[q + i] += (weights[t] / total) * value[k + i];
      });
    }
    return out;
  }

  feed(cache, token) { // -> the final hidden state
    const { hidden_size: width, rms_norm_eps: epsilon } = this.config;
    let x = this.weights['model.embed_tokens.weight'].slice(token * width, (token + 1) * width);
    cache.forEach((rows, layer) => {
      const w = (name) => this.weights[`model.layers.${layer}.${name}`];
      const h = norm(x, w('input_layernorm.weight'), epsilon);
      const project = (n) => multiply(w(`self_attn.${n}_proj.weight`), h, w(`self_attn.${n}_proj.bias`));
      const [q, k, v] = [...'qkv'].map(project);
      const [query, key] = [[q, 'q'], [k, 'k']].map(([y, n]) => {
        const scale = w(`self_attn.${n}_norm.weight`); // Qwen 3 has it
        return this.rotate(scale ? norm(y, scale, epsilon) : y, rows.length);
      });
      rows.push([key, v]);
      x = add(x, multiply(w('self_attn.o_proj.weight'), this.attend(query, rows)));
      const m = norm(x, w('post_attention_layernorm.weight'), epsilon), up = multiply(w('mlp.up_proj.weight'), m);
      const gated = multiply(w('mlp.gate_proj.weight'), m).map((g, i) => (g / (1 + Math.exp(-g))) * up[i]);
      x = add(x, multiply(w('mlp.down_proj.weight'), gated));
    });
    return norm(x, this.weights['model.norm.weight'], epsilon);
  }

  logits(hidden) {
    return multiply(this.weights['lm_head.weight'] ?? this.weights['model.embed_tokens.weight'], hidden);
  }

  score(tokens) { // log-probabilities at temperature 1; the first, which nothing predicts, is 0
    const cache = this.cache(), out = new Float32Array(tokens.length);
    for (let i = 1; i < tokens.length; i++) {
      const logits = this.logits(this.feed(cache, tokens[i - 1])), most = logits.reduce((a, b) => Math.max(a, b));
      out[i] = logits[tokens[i]] - most - Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
    }
    return out;
  }
}

// [token, its log-probability in the distribution sampled from]; u: in [0, 1).
function sample(logits, { temperature, top_k: k, top_p: p }, u) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  let order = Array.from(logits, (logit, token) => ({ token, scaled: (logit - most) / temperature }));
  if (k > 0 || p < 1) {
    order.sort((a, b) => b.scaled - a.scaled);
    if (k > 0) order = order.slice(0, k);
    const total = order.reduce((sum, one) => sum + Math.exp(one.scaled), 0);
    let mass = 0; // the smallest set of at least p of it
    if (p < 1) order = order.filter((one) => (mass += Math.exp(one.scaled) / total) - Math.exp(one.scaled) / total < p);
  }
  const total = order.reduce((sum, one) => sum + Math.exp(one.scaled), 0);
  let sum = 0;
  const chosen = order.find((one) => { sum += Math.exp(one.scaled); return sum > u * total; }) ?? order[0];
  return [chosen.token, Math.min(0, chosen.scaled - Math.log(total))];
}

module.exports = { Policy, sample };
