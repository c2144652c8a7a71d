"""The embedded generator's computations on the device: pure functions over a fixed number of slots.

    prefill   prompt tokens [bucket]           -> their keys and values, once per group and version of the weights
    extend    a prefix and tokens after it     -> the longer prefix, for the next turn
    copy_slot a slot                           -> its prefix, for the next turn
    insert    a prefix and settings into slots -> slots that are live at their prompt's last token; without the prefix
                                                  where they read it from shared prompts (prompts.py)
    move      slots to free places             -> the live slots are together at the front
    decode    N steps of the first slots       -> N tokens per slot; slots that end stop being live in mid-chunk

A slot holds the token to be fed next and the position at which it is fed. One step feeds it (its keys and values enter
the cache), samples from the float32 logits, and advances; prefill stops before the prompt's last token, so every token
is sampled in one place. The weights are an argument: a new version is another argument, and keys and values computed
with older weights stay.

Thinking and answer (phases of a slot):

    THINK    sampled; ends when end_of_thinking has just been sampled (-> ANSWER) or its budget is spent (-> PHRASE)
    PHRASE   the phrase's tokens are fed one a step, whatever the model would sample: forced, logprob 0 (-> ANSWER)
    ANSWER   sampled; ends with the answer budget: LENGTH

A stop token sampled in any phase ends the slot with STOP, a full cache with LENGTH.

Layers are unrolled in Python with one cache array each: in a scanned layer the cache would be copied. A step reads the
whole cache (of long ones on accelerators only the live part: live_attention.py), so the host keeps the cache as short
as the longest slot allows, in a few compiled sizes, and fits it between chunks: cutting a part out of a longer one
would cost a copy per chunk.

Legend: B slots, W of them in a chunk, S positions, N steps, K key/value heads and h head size of the caches, H query
heads, V vocabulary, P prompt positions (padded), F, E, T longest phrase, end of thinking and list of stop tokens,
L layers, k experts of a token.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_server.engines.engine import LONGEST_END, LONGEST_PHRASE, MOST_STOPS
from rollout_server.engines.jax import caches as caches_lib
from rollout_server.engines.jax import prompts as shared
from rollout_server.engines.jax.caches import Caches, Held
from rollout_server.engines.jax.prompts import NO_SEAT, Prompts, Readers
from rollout_server.engines.jax.sampling import sample, uniforms
from rollout_server.engines.jax.weights import DecodeLayer, DecodePrecision, DecodeRowLayer, DecodeWeights, product
from scalerl_jax.contract.codec import expert_dtype
from scalerl_jax.model.attention import packed_attention, plain_on
from scalerl_jax.model.attention.tiles import attend_slots, attend_slots_on_cpu
from scalerl_jax.model.decoder import Rotation, final_norm, rope_tables, rotation_of
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families import FAMILIES
from scalerl_jax.model.head import as_rounded, head_weight, logits, spread_of
from scalerl_jax.model.row_blocks import in_blocks

THINK, PHRASE, ANSWER = 0, 1, 2
RUNNING, STOP, LENGTH = 0, 1, 2

NO_TOKEN = -1  # in padded lists of tokens; no token of a vocabulary


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """The settings of a slot, from its request."""

    seed: Any  # [B, 2] uint32
    temperature: Any  # [B] float32
    top_k: Any  # [B] int32; 0: off
    top_p: Any  # [B] float32; 1: off
    thinking_budget: Any  # [B] int32; 0: no thinking
    answer_budget: Any  # [B] int32
    phrase: Any  # [B, F] int32, padded on the right
    phrase_length: Any  # [B] int32
    end: Any  # [B, E] int32, padded on the left; only padding: thinking ends by its budget only
    stops: Any  # [B, T] int32


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class State:
    """The state of all slots."""

    keys: Caches  # [B, K, h, S] each, on accelerators in the layout of values; rotated
    values: Caches  # [B, K, S, h] each
    seat: jax.Array  # [B] int32: which shared prompt it reads; NO_SEAT: its prompt is in keys and values
    token: jax.Array  # [B] int32: fed next
    position: jax.Array  # [B] int32: position of `token`
    live: jax.Array  # [B] bool
    phase: jax.Array  # [B] int32
    left: jax.Array  # [B] int32: sampled tokens left of the phase's budget
    cursor: jax.Array  # [B] int32: into the phrase
    recent: jax.Array  # [B, E] int32: the last tokens sampled
    settings: DecodeSettings


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Output:
    """Output of one chunk. A slot's tokens are those of the steps at which it was live, a prefix of the chunk."""

    tokens: jax.Array  # [N, W] int32
    logprobs: jax.Array  # [N, W] float32, 0 where forced
    forced: jax.Array  # [N, W] bool
    live: jax.Array  # [N, W] bool
    finish: jax.Array  # [W] int32: RUNNING, STOP or LENGTH
    experts: jax.Array | None  # [N, W, L, k] uint8 | uint16: of the token fed, not the one sampled


def empty_settings(slots: int) -> DecodeSettings:
    """Empty settings on the host, to be filled row by row."""
    return DecodeSettings(
        seed=np.zeros((slots, 2), np.uint32),
        temperature=np.ones(slots, np.float32),
        top_k=np.zeros(slots, np.int32),
        top_p=np.ones(slots, np.float32),
        thinking_budget=np.zeros(slots, np.int32),
        answer_budget=np.ones(slots, np.int32),
        phrase=np.full((slots, LONGEST_PHRASE), NO_TOKEN, np.int32),
        phrase_length=np.zeros(slots, np.int32),
        end=np.full((slots, LONGEST_END), NO_TOKEN, np.int32),
        stops=np.full((slots, MOST_STOPS), NO_TOKEN, np.int32),
    )


def empty_state(config: DecoderConfig, precision: DecodePrecision, *, slots: int, length: int) -> State:
    keys, values = caches_lib.empty(config, precision, rows=slots, length=length)

    def zeros() -> jax.Array:
        return jnp.zeros(slots, jnp.int32)

    return State(
        keys=keys,
        values=values,
        seat=jnp.full(slots, NO_SEAT, jnp.int32),
        token=zeros(),
        position=zeros(),
        live=jnp.zeros(slots, bool),
        phase=zeros(),
        left=zeros(),
        cursor=zeros(),
        recent=jnp.full((slots, LONGEST_END), NO_TOKEN, jnp.int32),
        # Copies: the state is donated, and on a CPU an array may share the host's memory.
        settings=jax.tree.map(lambda x: jnp.array(x, copy=True), empty_settings(slots)),
    )


# ------------------------------------------------------------------------------------------------ the layers


def _layers(weights: DecodeWeights, config: DecoderConfig) -> list[Any]:
    """The weights of each layer; models with two kinds of layers also get "local", the kind."""
    local = config.local_layers()
    return [{**own, "local": local[i]} if local else own for i, own in enumerate(weights["layers"])]


def _through(
    weights: DecodeWeights,
    x: jax.Array,
    attend: Any,
    rotation: Rotation,
    *,
    config: DecoderConfig,
    precision: DecodePrecision,
) -> tuple[jax.Array, list[Any]]:
    """x [..., width] through every layer: (same shape, each layer's experts [..., k] of the tokens, or None)."""
    layer, chosen = FAMILIES[config.family].layer, []
    for own in _layers(weights, config):
        decoding = (DecodeRowLayer if precision.bitwise else DecodeLayer)(own, config, rotation, precision)
        x = layer(decoding, x, attend)
        chosen.append(decoding.chosen)
    return x, chosen


# ----------------------------------------------------------------------------------------- prefill and insert


def feed_prompt(
    weights: DecodeWeights, tokens: jax.Array, *, config: DecoderConfig, precision: DecodePrecision
) -> tuple[jax.Array, Caches, Caches, list[Any]]:
    """tokens [P] int32 through every layer: (hidden states [1, P, width], keys, values, each layer's experts)."""
    rotation = rotation_of(config, jnp.arange(len(tokens))[None], precision)
    segment_ids = jnp.ones((1, len(tokens)), jnp.int32)
    x = weights["embed"][tokens][None].astype(precision.compute)
    keys: Caches = []
    values: Caches = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, local: bool = False) -> jax.Array:
        key, value = (caches_lib.as_cached(x[0], config, precision) for x in (k, v))
        keys.append(jnp.moveaxis(key, 0, 1 + precision.keys_last))
        values.append(jnp.moveaxis(value, 0, 1))
        chunks = 1 + jnp.arange(len(tokens))[None] // config.attention_chunk if local else segment_ids
        backend = plain_on(precision.platform, bitwise=precision.bitwise)
        return packed_attention(q, k, v, chunks, precision=precision.dot, backend=backend)

    x, chosen = _through(weights, x, attend, rotation, config=config, precision=precision)
    return x, keys, values, chosen


@functools.partial(jax.jit, static_argnames=("config", "precision", "experts"))
def prefill(
    weights: DecodeWeights,
    tokens: jax.Array,
    *,
    config: DecoderConfig,
    precision: DecodePrecision,
    experts: bool = False,
) -> tuple[Caches, Caches, jax.Array | None]:
    """Keys [K, h, P] (on a TPU [K, P, h]) and values [K, P, h] per layer of one prompt, tokens [P] int32.

    Padding at its end is harmless. experts: also returns each token's experts [P, L, k] uint8 | uint16, else None.
    """
    _, keys, values, chosen = feed_prompt(weights, tokens, config=config, precision=precision)
    return keys, values, _together(chosen, config)[0] if experts else None


@functools.partial(jax.jit, static_argnames=("config", "precision", "experts"), donate_argnames=("keys", "values"))
def extend(
    weights: DecodeWeights,
    keys: Caches,
    values: Caches,
    tokens: jax.Array,
    known: jax.Array,
    *,
    config: DecoderConfig,
    precision: DecodePrecision,
    experts: bool = False,
) -> tuple[Caches, Caches, jax.Array | None]:
    """As `prefill`, for tokens [C] int32 after a prefix whose first `known` positions are valid.

    keys [K, h, P] (on a TPU [K, P, h]) and values [K, P, h] of each layer, with P at least known + C.
    """
    positions = known + jnp.arange(len(tokens))
    x = weights["embed"][tokens][None].astype(precision.compute)
    keys, values = list(keys), list(values)
    layer = itertools.count()

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, local: bool = False) -> jax.Array:
        i = next(layer)
        key, value = (caches_lib.as_cached(x[0], config, precision) for x in (k, v))
        at = (0, 0, known) if precision.keys_last else (0, known, 0)
        keys[i] = jax.lax.dynamic_update_slice(keys[i], jnp.moveaxis(key, 0, 1 + precision.keys_last), at)
        values[i] = jax.lax.dynamic_update_slice(values[i], jnp.moveaxis(value, 0, 1), (0, known, 0))
        first = positions // config.attention_chunk * config.attention_chunk if local else jnp.zeros_like(positions)
        return caches_lib.attend_one(q[0], keys[i], values[i], positions, first, keys_last=precision.keys_last)[None]

    rotation = rope_tables(config, positions[None])
    _, chosen = _through(weights, x, attend, rotation, config=config, precision=precision)
    return keys, values, _together(chosen, config)[0] if experts else None


def _together(chosen: list[Any], config: DecoderConfig) -> jax.Array:
    """Stacks each layer's experts [..., k] int32 to [..., L, k] in the dtype of the contract."""
    return jnp.stack(chosen, axis=-2).astype(expert_dtype(config.experts))


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(
    state: State,
    prefix: tuple[Caches, Caches] | None,
    slots: jax.Array,
    seats: jax.Array,
    numbers: jax.Array,
    settings: DecodeSettings,
) -> State:
    """Makes completions of one prompt live.

    Args:
      prefix: keys and values from `prefill`, fitted to the cache's length; they replace each slot's own. None: the
        slots have seats.
      slots: [B] int32, of which the first `count` are used.
      seats: [B] int32, of slot i; NO_SEAT: none.
      numbers: [3] int32: count, the prompt's last token, its position.
      settings: row i is for slot i.
    """
    count, token, position = numbers
    entering = jnp.zeros(len(slots), bool).at[slots].set(jnp.arange(len(slots)) < count, mode="drop")

    def put(old: jax.Array, new: Any) -> jax.Array:
        return jnp.where(entering.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    def enter(i: jax.Array, caches: Any) -> Any:
        return jax.tree.map(
            lambda cache, new: jax.lax.dynamic_update_slice(cache, new[None], (slots[i], 0, 0, 0)), caches, prefix
        )

    keys, values = state.keys, state.values
    if prefix is not None:
        # A loop over the entering slots; a scatter would walk over all slots.
        keys, values = jax.lax.fori_loop(0, count, enter, (keys, values))
    # A slot whose sequence has left may still have one of these seats.
    given = jnp.any(state.seat[:, None] == jnp.where(entering, seats, NO_SEAT), axis=1)

    thinks = (settings.thinking_budget > 0) & (settings.phrase_length > 0)
    return State(
        keys=keys,
        values=values,
        seat=put(jnp.where(given, NO_SEAT, state.seat), seats),
        token=put(state.token, token),
        position=put(state.position, position),
        live=put(state.live, True),
        phase=put(state.phase, jnp.where(thinks, THINK, ANSWER)),
        left=put(state.left, jnp.where(thinks, settings.thinking_budget, settings.answer_budget)),
        cursor=put(state.cursor, 0),
        recent=put(state.recent, NO_TOKEN),
        settings=jax.tree.map(put, state.settings, settings),
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def move(state: State, origins: jax.Array, targets: jax.Array, count: jax.Array) -> State:
    """Moves slot origins[i] to slot targets[i], for the first `count` of [B] int32 each; overwrites the targets."""

    def one(i: jax.Array, state: State) -> State:
        def copy(rows: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(rows, origins[i], keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(rows, row, targets[i], 0)

        state = jax.tree.map(copy, state)
        gone = state.live.at[origins[i]].set(False), state.seat.at[origins[i]].set(NO_SEAT)
        return dataclasses.replace(state, live=gone[0], seat=gone[1])

    return jax.lax.fori_loop(0, count, one, state)


# ----------------------------------------------------------------------------------------------------- decode


@functools.partial(
    jax.jit,
    static_argnames=("config", "precision", "steps", "maximum", "width", "filtered", "experts"),
    donate_argnames=("state",),
)
def decode_chunk(
    weights: DecodeWeights,
    state: State,
    prompts: Prompts | None = None,
    *,
    config: DecoderConfig,
    precision: DecodePrecision,
    steps: int,
    maximum: int,
    width: int,
    filtered: bool = False,
    experts: bool = False,
) -> tuple[State, Output]:
    """`steps` steps of the first `width` slots, none of which grows beyond `maximum` tokens, prompt included.

    prompts: those of the slots that have seats.
    filtered: whether a live slot has a top_k or top_p that drops a token.
    experts: also returns the experts of the tokens fed.

    The caller ensures that the cache is long enough for every live slot. With fewer than all slots, their part of the
    caches is copied out and back once a chunk.
    """
    whole = state
    if width < len(whole.token):
        state = jax.tree.map(lambda rows: rows[:width], whole)
    # A live slot advances by one a step, so all angles and random numbers are known before the first.
    positions = state.position + jnp.arange(steps)[:, None]
    per_step = (
        rotation_of(config, positions, precision), uniforms(state.settings.seed, positions), jnp.arange(steps)
    )  # fmt: skip
    readers = None
    if prompts is not None:
        readers = shared.readers(prompts, state.seat, state.live, shared.seats(precision))
    held = None
    if precision.kept_apart:
        held = Held(state.keys, state.values, state.position - (0 if readers is None else readers.known))
        keys, values = (caches_lib.nothing_new(caches, steps) for caches in (state.keys, state.values))
        state = dataclasses.replace(state, keys=keys, values=values)

    def step(state: State, xs: Any) -> tuple[State, Any]:
        rotation, u, number = xs
        both: Any = {"config": config, "precision": precision}
        logit, keys, values, chosen = _feed(weights, state, prompts, readers, rotation, held, number, **both)
        with jax.named_scope("sample"):
            token, logprob = _draw(logit, state.settings, u, filtered=filtered, precision=precision)
        state, outputs = _advance(dataclasses.replace(state, keys=keys, values=values), token, logprob, maximum=maximum)
        return state, (*outputs, _together(chosen, config) if experts else None)

    state, (tokens, logprobs, forced, live, finish, routes) = jax.lax.scan(step, state, per_step)
    if held is not None:
        keys, values = caches_lib.merged(held, state.keys, state.values)
        state = dataclasses.replace(state, keys=keys, values=values)
    if width < len(whole.token):
        state = jax.tree.map(lambda rows, new: jax.lax.dynamic_update_slice_in_dim(rows, new, 0, 0), whole, state)
    ends = jnp.max(finish, axis=0)
    return state, Output(tokens=tokens, logprobs=logprobs, forced=forced, live=live, finish=ends, experts=routes)


def _draw(
    logit: jax.Array, settings: DecodeSettings, u: jax.Array, *, filtered: bool, precision: DecodePrecision
) -> tuple[jax.Array, jax.Array]:
    """(tokens [B] int32, log-probs [B] float32) for logits [B, V] and uniform numbers [B, 2]."""
    temperature, top_k, top_p = settings.temperature, settings.top_k, settings.top_p
    draw = functools.partial(sample, filtered=filtered)
    rows = logit, temperature, top_k, top_p, u
    if not precision.bitwise:
        return draw(*rows)
    token, logprob = in_blocks(lambda rows, _: draw(*rows), rows, lead=1)
    # As training computes it, where the sampling distribution is the policy's.
    shifted, spread = spread_of(logit, precision)
    plain = (jnp.take_along_axis(shifted, token[:, None], axis=1) - spread)[:, 0]
    return token, jnp.where((temperature == 1) & (top_k == 0) & (top_p == 1), plain, logprob)


def _feed(
    weights: DecodeWeights,
    state: State,
    prompts: Prompts | None,
    readers: Readers | None,
    rotation: Rotation,
    held: Held | None,
    number: jax.Array,
    *,
    config: DecoderConfig,
    precision: DecodePrecision,
) -> tuple[jax.Array, Caches, Caches, list[Any]]:
    """Feeds each slot's token: (logits [B, V] float32, keys, values, each layer's experts [B, k] of the token).

    held: the caches before this chunk; the state then has the chunk's own entries, and this is its step `number`.
    None: the state has the caches.
    """
    slots = jnp.arange(len(state.token))
    position = state.position if readers is None else state.position - readers.known  # in the slot's own cache
    x = weights["embed"][state.token].astype(precision.compute)
    keys: Caches = []
    values: Caches = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, local: bool = False) -> jax.Array:
        layer, prompt, first = len(keys), None, None
        if local:
            first = state.position // config.attention_chunk * config.attention_chunk
        if prompts is not None and readers is not None:
            prompt = shared.attend(q, prompts, layer, readers, first=first, precision=precision)
            first = first - readers.known if first is not None else None
        rest: Any = {"first": first, "prompt": prompt}
        key, value = state.keys[layer], state.values[layer]
        k, v = (caches_lib.as_cached(x, config, precision) for x in (k, v))
        if held is not None:
            keys.append(jax.lax.dynamic_update_slice_in_dim(key, k[:, :, None], number, 2))
            values.append(jax.lax.dynamic_update_slice_in_dim(value, v[:, :, None], number, 2))
            before, new = (held.keys[layer], held.values[layer]), (keys[-1], values[-1])
            return caches_lib.attend_held(q, before, new, held.start, number, **rest)
        # A slot that is not live may be at any position, even past the cache's end: then nothing is written.
        write: Any = {"mode": "drop", "unique_indices": True}
        key_at = key.at[slots, :, :, position] if precision.keys_last else key.at[slots, :, position]
        keys.append(key_at.set(k, **write))
        values.append(value.at[slots, :, position].set(v, **write))
        if precision.bitwise:
            of_slots = attend_slots_on_cpu if precision.on_cpu else attend_slots
            return of_slots(q, keys[-1], values[-1], position, precision.dot)
        return caches_lib.attend(q, keys[-1], values[-1], position, live=state.live, precision=precision, **rest)

    x, chosen = _through(weights, x, attend, rotation, config=config, precision=precision)
    x = final_norm(x, weights["final_norm"], config, precision, lead=1)
    if precision.bitwise:
        return logits(weights, config, x, precision=precision), keys, values, chosen
    head = head_weight(weights, config)  # in the head's dtype
    found = as_rounded(product(x.astype(head.dtype), head, on_cpu=precision.on_cpu), precision)
    return found, keys, values, chosen


def _advance(state: State, sampled: jax.Array, logprob: jax.Array, *, maximum: int) -> tuple[State, Any]:
    """One step of the phases: (state, (token, logprob, forced, live, finish) [B] of this step)."""
    s = state.settings
    forced = state.phase == PHRASE
    fed = jnp.take_along_axis(s.phrase, state.cursor[:, None], axis=1)[:, 0]
    token = jnp.where(forced, fed, sampled)
    recent = jnp.where(forced[:, None], state.recent, jnp.roll(state.recent, -1, axis=1).at[:, -1].set(sampled))
    matches = jnp.all((recent == s.end) | (s.end == NO_TOKEN), axis=1) & (s.end[:, -1] != NO_TOKEN)

    left = state.left - ~forced
    ended = (state.phase == THINK) & matches
    spent = (state.phase == THINK) & ~matches & (left == 0)
    cursor = jnp.where(forced, state.cursor + 1, 0)
    answers = ended | (forced & (cursor == s.phrase_length))
    phase = jnp.where(answers, ANSWER, jnp.where(spent, PHRASE, state.phase))

    stops = ~forced & jnp.any(token[:, None] == s.stops, axis=1)
    # The token of this step will be at position + 1; the token after it needs a position as well.
    full = state.position + 2 >= maximum
    cuts = full | ((state.phase == ANSWER) & (left == 0))
    finish = jnp.where(stops, STOP, jnp.where(cuts, LENGTH, RUNNING)) * state.live
    live = state.live & (finish == RUNNING)
    after = dataclasses.replace(
        state,
        token=jnp.where(live, token, state.token),
        position=state.position + live,
        live=live,
        phase=phase,
        left=jnp.where(answers, s.answer_budget, left),
        cursor=cursor,
        recent=recent,
    )
    return after, (token, jnp.where(forced, 0.0, logprob), forced, state.live, finish)
