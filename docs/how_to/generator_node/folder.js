// What a Hugging Face folder says: the decoder's shape, the tokenizer's fingerprint, the tensors' names and shapes, and
// the weights to begin with.
const crypto = require('crypto');
const fs = require('fs');
const path = require('path');

// A float as Python writes it, and text as its json module does: both ends compare these strings.
function float(x) {
  if (Number.isInteger(x) && Math.abs(x) < 1e16) return `${x}.0`;
  const [digits, exponent] = x.toExponential().split('e');
  if (exponent >= -4 && exponent < 16) return String(x);
  return `${digits}e${exponent < 0 ? '-' : '+'}${String(Math.abs(exponent)).padStart(2, '0')}`;
}
const ascii = (value) =>
  JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);

function modelConfig(config) { // StatusReply.model_config
  const shape = {
    vocab_size: config.vocab_size, hidden_size: config.hidden_size, layers: config.num_hidden_layers,
    heads: config.num_attention_heads, kv_heads: config.num_key_value_heads, head_dim: config.head_dim,
    intermediate_size: config.intermediate_size, rope_theta: float(config.rope_theta), rope_scaling: null,
    norm_epsilon: float(config.rms_norm_eps), family: ascii(config.model_type),
    tied_embeddings: config.tie_word_embeddings,
    // Of families with experts, or with layers of two kinds: none here.
    experts: 0, experts_per_token: 0, moe_intermediate_size: 0, norm_topk_prob: false, nope_interval: 0,
    attention_chunk: 0, head_l2_norm: false, temperature_tuning: false, floor_scale: 0, attn_scale: float(0),
  };
  return `{${Object.keys(shape).sort().map((key) => `"${key}": ${shape[key]}`).join(', ')}}`;
}

function fingerprint(tokenizer) { // StatusReply.tokenizer_fingerprint, of the content of tokenizer.json
  const { model, added_tokens: added } = tokenizer, parts = [`"kind":${ascii(model.type || 'BPE')}`];
  const pairs = Array.isArray(model.vocab) ? model.vocab.map(([token], id) => [id, token])
    : Object.entries(model.vocab).map(([token, id]) => [id, token]);
  const tokens = new Map([...pairs, ...(added ?? []).map(({ id, content }) => [id, content])]);
  if ('merges' in model) {
    parts.push(`"merges":${ascii(model.merges.map((merge) => (Array.isArray(merge) ? merge : merge.split(' '))))}`);
  }
  if (Array.isArray(model.vocab)) parts.push(`"scores":[${model.vocab.map(([, value]) => float(value)).join(',')}]`);
  parts.push(`"tokens":${ascii([...tokens].sort(([a], [b]) => a - b))}`);
  return crypto.createHash('sha256').update(`{${parts.join(',')}}`).digest('hex');
}

function shapes(config) { // Hugging Face name -> shape
  const { hidden_size: width, head_dim: size, intermediate_size: mlp, vocab_size: vocabulary } = config;
  const [heads, groups] = [config.num_attention_heads * size, config.num_key_value_heads * size];
  const { model_type: family } = config;
  const out = { 'model.embed_tokens.weight': [vocabulary, width], 'model.norm.weight': [width] };
  if (!config.tie_word_embeddings) out['lm_head.weight'] = [vocabulary, width];
  const layer = {
    'input_layernorm.weight': [width], 'post_attention_layernorm.weight': [width],
    'self_attn.q_proj.weight': [heads, width], 'self_attn.k_proj.weight': [groups, width],
    'self_attn.v_proj.weight': [groups, width], 'self_attn.o_proj.weight': [width, heads],
    'mlp.gate_proj.weight': [mlp, width], 'mlp.up_proj.weight': [mlp, width], 'mlp.down_proj.weight': [width, mlp],
    ...(family === 'qwen3' && { 'self_attn.q_norm.weight': [size], 'self_attn.k_norm.weight': [size] }),
    ...(family === 'qwen2' && {
      'self_attn.q_proj.bias': [heads], 'self_attn.k_proj.bias': [groups], 'self_attn.v_proj.bias': [groups],
    }),
  };
  for (let i = 0; i < config.num_hidden_layers; i++) {
    for (const [name, shape] of Object.entries(layer)) out[`model.layers.${i}.${name}`] = shape;
  }
  return out;
}

// Tensors of a sync dtype as numbers; bfloat16 is the upper half of a float32.
function floats(bytes, dtype) {
  if (dtype === 'float32' || dtype === 'F32') return new Float32Array(Uint8Array.from(bytes).buffer);
  const upper = new Uint16Array(Uint8Array.from(bytes).buffer);
  return new Float32Array(Uint32Array.from(upper, (bits) => bits << 16).buffer);
}

function safetensors(file) { // a length, a JSON object, the tensors' bytes
  const content = fs.readFileSync(file), start = 8 + Number(content.readBigUInt64LE(0));
  const { __metadata__, ...header } = JSON.parse(content.subarray(8, start));
  const bytes = ([from, to]) => content.subarray(start + from, start + to);
  return Object.entries(header).map(([name, { dtype, data_offsets: place }]) => [name, floats(bytes(place), dtype)]);
}

function readFolder(folder) {
  const read = (name) => JSON.parse(fs.readFileSync(path.join(folder, name), 'utf8'));
  const given = read('config.json'), heads = given.num_attention_heads;
  const scaling = given.rope_scaling?.rope_type ?? given.rope_parameters?.rope_type ?? 'default';
  if (!['qwen3', 'qwen2', 'llama'].includes(given.model_type) || scaling !== 'default') {
    throw new Error(`${folder}: ${given.model_type} with ${scaling} positions is not computed here`);
  }
  const config = {
    ...given,
    num_key_value_heads: given.num_key_value_heads ?? heads,
    head_dim: given.head_dim ?? given.hidden_size / heads,
    rope_theta: given.rope_theta ?? given.rope_parameters?.rope_theta ?? 10000,
    rms_norm_eps: given.rms_norm_eps ?? 1e-6,
    tie_word_embeddings: given.tie_word_embeddings ?? false,
  };
  const files = fs.readdirSync(folder).filter((name) => name.endsWith('.safetensors'));
  return {
    config, modelConfig: modelConfig(config), fingerprint: fingerprint(read('tokenizer.json')), shapes: shapes(config),
    tensors: Object.fromEntries(files.flatMap((name) => safetensors(path.join(folder, name)))),
  };
}

module.exports = { floats, readFolder };
