"""config.numerics=bitwise: what the embedded generator says of its tokens is what the trainer computes, to the bit.

Costs 15 CPU seconds a case.
"""

import functools

import jax
import numpy as np
import pytest

from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import decode_precision, decode_weights
from rollout_server.engines.sequence import Counters, Sequence
from scalerl_jax.learner.packing import pack, plain, unpack
from scalerl_jax.model import Precision, forward, token_logprobs
from scalerl_jax.model.attention import BLOCKS, TILES
from scalerl_jax.model.row_blocks import TILE
from tests.rollout_server.jax_reference import ask
from tests.support.families import CASES, decoder
from tests.support.models import random_tensors
from tests.support.params import from_hf

LONGEST = 160
IN_FULL = [("llama-fours-untied-scaled", "bfloat16")]
CASES_AND_DTYPES = [
    (case, dtype) if (case, dtype) in IN_FULL else pytest.param(case, dtype, marks=pytest.mark.long)
    for case in CASES
    if not decoder(case).experts
    for dtype in ("float32", "bfloat16")
]


def sampled(config, named, precision, *, slots, steps, seed=0, narrow=0):
    """[(prompt, token ids, log-probs)] of five groups of three, of many lengths, through a pool of slots.

    narrow: the width of the chunks that are taken while no more slots are."""
    rng = np.random.default_rng(seed)
    pool = SlotPool(config, decode_precision(precision, "cpu"), slots=slots, maximum=LONGEST, steps=steps)
    weights, waiting = decode_weights(named, config, precision), []
    if narrow:
        program = functools.cache(functools.partial(pool._compile_chunk, narrow))
        pool._programs.narrowest = lambda taken, kind: (narrow, program(kind)) if taken <= narrow else (slots, None)
    for i in range(5):
        prompt = rng.integers(0, config.vocab_size, int(rng.integers(2, 70))).astype(np.int32)
        request = ask(prompt, name=f"g{i}", seeds=(i, i + 100, i + 200), answer_budget=int(rng.integers(3, 80)))
        waiting += [Sequence(request, c, counters=Counters(), maximum_tokens=LONGEST) for c in request.completions]
    out = []
    while waiting or pool.busy:
        while waiting and pool.slots > pool.busy:
            sequence = waiting.pop(0)
            pool.enter(pool.prefill(weights, sequence.request.prompt), [sequence], step=0)
        pool.dispatch(weights, 0)
        for sequence in pool.collect():
            found = sequence.completion()
            out.append((sequence.request.prompt, found.token_ids, found.logprobs))
    pool.close()
    return out


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def update(params, batch, *, config, precision):
    """(gradient, log-probs) of a packed micro-batch."""

    def loss(params):
        hidden = forward(
            params, config, batch["tokens"], batch["positions"], batch["segment_ids"], precision=precision,
            attention=TILES if precision.bitwise else BLOCKS,
        )  # fmt: skip
        logp = token_logprobs(params, config, hidden, batch["targets"], precision=precision)
        return -(logp * (batch["segment_ids"] > 0)).sum(), logp

    return jax.grad(loss, has_aux=True)(params)


def trained(config, named, precision, completions, *, rows, length):
    """The gradient and the log-probs of these completions as an update computes them on its way."""
    segments = [plain(np.concatenate([prompt, tokens])) for prompt, tokens, _ in completions]
    batches, places = pack(segments, length=length, rows=rows, align=TILE)
    params, scored, gradient = from_hf(named, config), [], None
    for batch in batches:
        more, logp = update(params, batch.arrays(), config=config, precision=precision)
        scored.append(np.asarray(logp))
        gradient = more if gradient is None else jax.tree.map(np.add, gradient, more)
    parts = unpack(scored, places)
    return gradient, [part[-len(tokens) :] for part, (_, tokens, _) in zip(parts, completions)]


def others(completions, logprobs) -> tuple[int, int]:
    """(tokens with other bits, tokens)"""
    pairs = [(theirs.view(np.int32), ours.view(np.int32)) for (_, _, theirs), ours in zip(completions, logprobs)]
    return sum(int((a != b).sum()) for a, b in pairs), sum(len(a) for a, _ in pairs)


def together(completions):
    return sorted(tuple(x.tobytes() for x in completion) for completion in completions)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES)
def test_a_tokens_log_prob_is_the_same_to_the_bit(case, dtype):
    """Whatever slots and chunks it was sampled in, and however its segment is packed; inside of a gradient."""
    config, precision = decoder(case), Precision(dtype, dtype, numerics="bitwise")
    named = random_tensors(config, 0)
    completions = sampled(config, named, precision, slots=5, steps=3)
    for some, rows, length in ((completions, 2, 256), (completions[::-1], 1, 192), (completions[:1], 1, 160)):
        _, logprobs = trained(config, named, precision, some, rows=rows, length=length)
        assert others(some, logprobs) == (0, sum(len(tokens) for _, tokens, _ in some))


@pytest.mark.slow
@pytest.mark.long
def test_of_more_slots_than_a_block_has_rows():
    config, precision = decoder("llama-alone-tied"), Precision(numerics="bitwise")
    named = random_tensors(config, 1)
    completions = sampled(config, named, precision, slots=70, steps=8)
    assert others(completions, trained(config, named, precision, completions, rows=3, length=224)[1])[0] == 0


@pytest.mark.slow
def test_bits_are_the_trainers_and_the_gradient_that_of_the_other_numerics():
    """Those have other bits: a test of nothing but equal programs would be seen. A chunk of any width samples alike."""
    config = decoder("qwen3-fours-untied-scaled")
    named, fast, bitwise = random_tensors(config, 0), Precision(), Precision(numerics="bitwise")
    completions = sampled(config, named, bitwise, slots=5, steps=3)
    gradient, ours = trained(config, named, bitwise, completions, rows=2, length=256)
    different, tokens = others(completions, ours)
    assert different == 0 and tokens == 834
    assert together(completions) == together(sampled(config, named, bitwise, slots=20, steps=8, narrow=3))
    expected, logprobs = trained(config, named, fast, completions, rows=2, length=256)
    assert others(completions, logprobs)[0] > tokens / 10
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(logprobs), atol=2e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()
