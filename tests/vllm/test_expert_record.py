"""What is kept of the routers' choices when requests share a prompt, are put aside, or are given up."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines.vllm.expert_record import KEY, ExpertRecord
from tests.support.models import toy_decoder

CONFIG = toy_decoder(family="qwen3_moe")
BLOCK, BLOCKS, MOST = 4, 16, 32


class Router:
    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


class Batches:
    """A runner of vLLM's, as far as it is looked at: requests with the blocks that their tokens lie in."""

    def __init__(self, *, layers: int = CONFIG.layers) -> None:
        self.routers = [Router() for _ in range(layers)]
        modules = [
            (f"model.layers.{i}.mlp.experts", SimpleNamespace(router=router)) for i, router in enumerate(self.routers)
        ]
        self.model = SimpleNamespace(named_modules=lambda: modules)
        self.max_num_tokens, self.max_num_reqs, self.device = MOST, 2, "cpu"
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS)
        self._rng = np.random.default_rng(0)

    def run(
        self, record: ExpertRecord, *parts: tuple[str, int, int, list[int]], new: tuple[str, ...] = (), **told: Any
    ):
        """One step: of each request (name, tokens known, tokens fed, blocks). Returns what was chosen of each."""
        chosen = self._rng.integers(0, CONFIG.experts, (sum(fed for _, _, fed, _ in parts), CONFIG.layers, 2))
        for layer, router in enumerate(self.routers):
            router.capture(torch.from_numpy(chosen[:, layer]))
        table = np.zeros((len(parts), BLOCKS), np.int32)
        for row, (_, _, _, blocks) in zip(table, parts, strict=True):
            row[: len(blocks)] = blocks
        self.input_batch = SimpleNamespace(
            req_ids=[name for name, *_ in parts],
            num_computed_tokens_cpu=np.array([known for _, known, _, _ in parts]),
            block_table=[SimpleNamespace(get_numpy_array=lambda: table, block_size=BLOCK)],
        )
        counts = {name: fed for name, _, fed, _ in parts}
        asking = SimpleNamespace(extra_args={KEY: True})
        record.step(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=name, sampling_params=asking) for name in new],
                finished_req_ids=told.get("finished", ()),
                num_scheduled_tokens=counts,
                total_num_scheduled_tokens=sum(counts.values()),
                kv_cache_block_copies=told.get("copies"),
            )
        )
        ends = np.cumsum([fed for _, _, fed, _ in parts])
        return np.split(chosen, ends[:-1])


def test_a_prompt_in_the_prefix_cache_has_the_choices_of_who_put_it_there() -> None:
    runner = Batches()
    record = ExpertRecord(runner, CONFIG)
    (first,) = runner.run(record, ("silent-1", 0, 9, [3, 5, 7]))  # asks for nothing, and fills three blocks
    (rest,) = runner.run(record, ("completion-1-ab", 8, 2, [3, 5, 9]), new=("completion-1-ab",))
    (more,) = runner.run(record, ("completion-1-ab", 10, 1, [3, 5, 9]))
    np.testing.assert_array_equal(record.pop("completion-1"), np.concatenate([first[:8], rest, more]))
    with pytest.raises(KeyError, match="completion-1"):  # once
        record.pop("completion-1")
    with pytest.raises(KeyError, match="silent-1"):
        record.pop("silent-1")


def test_names_that_begin_alike_are_told_apart() -> None:
    runner = Batches()
    record = ExpertRecord(runner, CONFIG)
    names = ("completion-1-ab", "completion-11-cd")
    one, other = runner.run(record, (names[0], 0, 3, [1]), (names[1], 0, 2, [2]), new=names)
    np.testing.assert_array_equal(record.pop("completion-1"), one)
    np.testing.assert_array_equal(record.pop("completion-11"), other)


def test_what_was_put_aside_is_computed_anew_from_where_it_is_taken_up() -> None:
    runner = Batches()
    record = ExpertRecord(runner, CONFIG)
    (first,) = runner.run(record, ("completion-2-x", 0, 7, [1, 2]), new=("completion-2-x",))
    runner.run(record, ("completion-2-x", 7, 1, [1, 2]))
    # It lost its blocks, but for the first one, which the prefix cache still had.
    (again,) = runner.run(record, ("completion-2-x", 4, 5, [1, 6, 8]))
    np.testing.assert_array_equal(record.pop("completion-2"), np.concatenate([first[:4], again]))


def test_blocks_that_vllm_copies_keep_their_choices() -> None:
    runner = Batches()
    record = ExpertRecord(runner, CONFIG)
    (first,) = runner.run(record, ("silent", 0, 6, [1, 2]))
    (rest,) = runner.run(record, ("completion-3-x", 6, 1, [1, 4]), new=("completion-3-x",), copies=[(2, 4)])
    np.testing.assert_array_equal(record.pop("completion-3"), np.concatenate([first, rest]))


def test_those_given_up_are_forgotten() -> None:
    runner = Batches()
    record = ExpertRecord(runner, CONFIG)
    names = [f"completion-{number}-x" for number in range(20)]
    for name in names:
        runner.run(record, (name, 0, 2, [1]), new=(name,))
        runner.run(record, ("other", 0, 1, [2]), finished=(name,))
    kept = 2 * runner.max_num_reqs
    assert len(record._rows) == kept
    record.pop(names[-kept].removesuffix("-x"))


def test_routers_that_tell_nothing_are_named() -> None:
    with pytest.raises(ValueError, match="--router_replay: in 1 of 2 layers this vLLM's routers tell their choice"):
        ExpertRecord(Batches(layers=1), CONFIG)
