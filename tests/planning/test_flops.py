"""The formula of the hardware's FLOPs beside the compiler's count, where nothing is in a loop."""

import dataclasses
import types

import pytest

from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.remat import BLOCK, NONE, REMATS
from scalerl_jax.planning import layout_plan
from scalerl_jax.planning.analytic import Flops, of_micro_batch, pairs
from scalerl_jax.planning.workload import Workload
from tests.support.models import toy_decoder
from tests.support.trainers import trainer_of

# One layer, one block of attention, one chunk of the head: every loop has one round. What the formula leaves out
# (norms, softmax, rotations, the loss) is small at this width.
WIDE = toy_decoder(
    family="llama", layers=1, hidden_size=256, heads=8, kv_heads=4, head_dim=32, intermediate_size=512, vocab_size=1024
)
ROWS, LENGTH = 2, 128
TOLERANCE = 0.04


def formula(decoder: DecoderConfig, remat: str, **changed: int) -> Flops:
    given = {"rows": ROWS, "seq_len": LENGTH, "longest": LENGTH, "block": LENGTH, **changed}
    return of_micro_batch(decoder, remat=remat, backend="blocks", **given)


@pytest.mark.parametrize("remat", REMATS)
def test_the_formula_is_the_compilers_count_where_nothing_is_scanned(remat):
    trainer = trainer_of(WIDE, Layout(seq_len=LENGTH, rows=ROWS, logprob_chunk=LENGTH, remat=remat, attention="blocks"))
    accumulate, _ = trainer.compile_update()
    counted, wanted = accumulate.cost_analysis()["flops"], formula(WIDE, remat)
    # With one chunk the compiler finds the logits that the backward pass would compute again.
    assert wanted.total - wanted.head / 4 == pytest.approx(counted, rel=TOLERANCE)


def test_without_remat_it_is_the_ledgers_formula():
    """Beside attention, of which the ledger counts the pairs that are allowed, and the head, which is made twice."""
    one = formula(WIDE, NONE)
    tokens = ROWS * LENGTH
    head = 8 * WIDE.vocab_size * WIDE.hidden_size * tokens
    assert one.head == head
    work = Workload(completions=ROWS, prompt_tokens=1, completion_tokens=LENGTH - 1, longest=LENGTH, row_use=1.0)
    attention = 3 * 4 * WIDE.heads * WIDE.head_dim * ROWS * LENGTH * (LENGTH + 1) / 2
    assert one.layers + 6 / 8 * head + attention == pytest.approx(work.model_flops(WIDE))


def test_more_is_computed_again_from_remat_to_remat():
    decoder = toy_decoder(layers=16)
    counts = [formula(decoder, remat).total for remat in REMATS]
    assert counts[0] == counts[1] and counts[1:] == sorted(set(counts))


def test_pairs_are_whole_blocks_that_the_mask_leaves():
    allowed = [[0 <= q - k < 300 for k in range(1024)] for q in range(1024)]
    blocks = [(i, j) for i in range(8) for j in range(8)]
    kept = sum(
        any(allowed[q][k] for q in range(128 * i, 128 * i + 128) for k in range(128 * j, 128 * j + 128))
        for i, j in blocks
    )
    assert pairs(1024, 300, "splash", 128) == kept * 128 * 128
    assert pairs(1024, 1024, "splash", 1024) == 1024**2
    assert pairs(1024, 300, "cudnn", 1) == sum(map(sum, allowed))


def test_keys_of_a_query_are_those_of_its_segment_where_the_kernel_skips_others():
    question = types.SimpleNamespace(workload=types.SimpleNamespace(attended=3000.0))
    notes = {
        "attention: splash on TPU v5, blocks of 1024 queries": 3000 + 1024,
        "attention: blocks, in plain XLA; not splash: needs rows of a multiple of 128 tokens": 8704,
    }
    for note, keys in notes.items():
        assert layout_plan._attended(question, note, 8704.0, block=1024, parts=1) == keys


def test_of_llama_4_s_local_layers_what_is_outside_of_the_chunk_is_left_out():
    decoder = toy_decoder(family="llama4_text", layers=4, nope_interval=4, attention_chunk=7)
    prompt, length = 10, 25
    shape = Workload(completions=3, prompt_tokens=prompt, completion_tokens=15, longest=99, row_use=1.0)
    positions = {(layer, at): at % 7 + 1 if layer < 3 else at + 1 for layer in range(4) for at in range(length)}
    each = 4 * decoder.heads * decoder.head_dim
    plain = dataclasses.replace(decoder, nope_interval=0)  # as if all attended to all
    alone = 3 * 3 * each * (sum(positions.values()) - 4 * length * (length + 1) / 2)
    assert shape.model_flops(decoder) - shape.model_flops(plain) == pytest.approx(alone)
    sampled = sum(seen for (_, at), seen in positions.items() if at >= prompt)
    alone = 3 * each * (sampled - 4 * (length * (length + 1) / 2 - prompt * (prompt + 1) / 2))
    assert shape.sampling_flops(decoder) - shape.sampling_flops(plain) == pytest.approx(alone)


def test_who_skips_what_is_outside_of_the_chunk():
    """cuDNN, which is given each chunk as a segment; blocks and splash mask it."""
    inside = sum(k <= q and k // 300 == q // 300 for q in range(1024) for k in range(1024))
    assert pairs(1024, 1024, "cudnn", 1, chunk=300) == inside
    assert pairs(1024, 200, "cudnn", 1, chunk=300) == pairs(1024, 200, "cudnn", 1)
    for backend in ("splash", "blocks"):
        assert pairs(1024, 1024, backend, 128, chunk=300) == pairs(1024, 1024, backend, 128)
    decoder = toy_decoder(family="llama4_text", layers=4, nope_interval=4, attention_chunk=32)
    counts = [
        of_micro_batch(one, rows=1, seq_len=128, longest=128, remat=BLOCK, backend="cudnn", block=1)
        for one in (decoder, dataclasses.replace(decoder, nope_interval=0))
    ]
    triangle = 128 * 129 / 2
    share = (triangle + 3 * 4 * 32 * 33 / 2) / (4 * triangle)
    assert counts[0].attention == pytest.approx(counts[1].attention * share) and counts[0].layers == counts[1].layers


def test_a_micro_batch_more_only_where_the_rows_are_full():
    work = Workload(completions=8, prompt_tokens=10, completion_tokens=90, longest=200, row_use=0.8)
    assert work.tokens == 800 and work.sampled == 720
    assert work.micro_batches(rows=2, seq_len=250) == 2
    assert work.micro_batches(rows=2, seq_len=249) == 3
    assert work.micro_batches(rows=100, seq_len=1000) == 1
