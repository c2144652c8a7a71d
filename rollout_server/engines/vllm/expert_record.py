"""Records the experts that vLLM's routers chose, for requests that ask for them (router replay).

Runs in vLLM's worker processes. Each step copies the routers' choices, a row for each token fed. They are kept

    by position   in the key/value cache, for every request: a prompt found in the prefix cache was routed by the
                  request that computed it, with the same keys and values
    by request    for requests that ask for them (KEY in SamplingParams.extra_args), until the server collects them

vLLM has its own option for this, but only in its newer model runner, in which forced phrases do not work.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

import numpy as np
import torch

from scalerl_jax.contract.codec import expert_dtype
from scalerl_jax.model.decoder_config import DecoderConfig, read_config

KEY = "scalerl_experts"  # in extra_args


class Recording:
    """Mixin for vLLM's worker; it must precede the worker class."""

    model_runner: Any
    model_config: Any

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)  # type: ignore[misc]
        # Before any graph is captured, so that graphs contain the copies.
        self._scalerl_record = ExpertRecord(self.model_runner, read_config(self.model_config.model))

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        self._scalerl_record.step(scheduler_output)
        return output

    def scalerl_experts(self, name: str) -> bytes | None:
        """The experts of the request `name`, in the contract's layout; its record is dropped. None except on rank 0.

        Raises KeyError where there is no such request.
        """
        rows = self._scalerl_record.pop(name)
        if self.model_runner.parallel_config.rank:  # all have the same
            return None
        return rows.tobytes()


@dataclasses.dataclass
class _ExpertRows:
    """The recorded rows of a request."""

    parts: list[np.ndarray] = dataclasses.field(default_factory=list)
    count: int = 0

    def add(self, part: np.ndarray) -> None:
        self.parts.append(part)
        self.count += len(part)

    def whole(self) -> np.ndarray:
        return np.concatenate(self.parts)


class ExpertRecord:
    """The record of one worker. Raises ValueError where this vLLM's routers cannot be hooked."""

    def __init__(self, runner: Any, config: DecoderConfig):
        self._runner, self._dtype = runner, expert_dtype(config.experts)
        self._chosen = torch.zeros(
            (runner.max_num_tokens, config.layers, config.experts_per_token), dtype=torch.int32, device=runner.device
        )
        self._places: np.ndarray | None = None  # [cache positions, layers, experts per token], once known
        self._rows: dict[str, _ExpertRows] = {}  # by vLLM's name of the request
        # Requests that have ended. Aborted requests are never collected, so the oldest are dropped. The size lets every
        # running request end and be collected before that.
        self._ended: collections.deque[str] = collections.deque(maxlen=2 * runner.max_num_reqs)
        listened = set()
        for name, module in runner.model.named_modules():
            router: Any = getattr(module, "router", None)
            layer = re.search(r"\blayers\.(\d+)\.", name)
            if layer is not None and hasattr(router, "set_capture_fn"):
                router.set_capture_fn(functools.partial(self._choose, int(layer[1])))
                listened.add(int(layer[1]))
        if listened != set(range(config.layers)):
            raise ValueError(
                f"--router_replay: in {len(listened)} of {config.layers} layers this vLLM's routers tell their choice"
            )

    def _choose(self, layer: int, ids: torch.Tensor) -> None:
        self._chosen[: len(ids), layer] = ids

    def step(self, scheduled: Any) -> None:
        """Records one step; call it after the model has run the scheduled tokens."""
        for new in scheduled.scheduled_new_reqs:
            if new.sampling_params is not None and (new.sampling_params.extra_args or {}).get(KEY):
                self._rows[new.req_id] = _ExpertRows()
        for name in scheduled.finished_req_ids:
            if name in self._rows:
                if len(self._ended) == self._ended.maxlen:
                    self._rows.pop(self._ended[0], None)
                self._ended.append(name)
        if not scheduled.total_num_scheduled_tokens:
            return
        rows = self._chosen[: scheduled.total_num_scheduled_tokens].cpu().numpy().astype(self._dtype)
        batch = self._runner.input_batch
        table = batch.block_table[0]
        blocks, size = table.get_numpy_array(), table.block_size
        count_blocks = self._runner.kv_cache_config.num_blocks
        if self._places is None:
            self._places = np.zeros((count_blocks * size, *rows.shape[1:]), self._dtype)
        for source, target in getattr(scheduled, "kv_cache_block_copies", None) or ():  # as vLLM copies the cache
            by_block = self._places.reshape(count_blocks, -1, *rows.shape[1:])
            by_block[target] = by_block[source]
        first = 0
        for index, name in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            known = int(batch.num_computed_tokens_cpu[index])
            own, first = rows[first : first + count], first + count
            self._places[_places(blocks[index], size, known, known + count)] = own
            if kept := self._rows.get(name):
                if kept.count > known:  # it was preempted, and is recomputed from `known` on
                    kept = self._rows[name] = _ExpertRows([kept.whole()[:known]], known)
                elif kept.count < known:
                    kept.add(self._places[_places(blocks[index], size, kept.count, known)])
                kept.add(own)

    def pop(self, name: str) -> np.ndarray:
        """[tokens fed, layers, experts per token] of a request by the server's name; drops its record."""
        # vLLM makes names unique by a suffix.
        full = next((full for full in self._rows if full == name or full.startswith(f"{name}-")), None)
        if full is None:
            raise KeyError(f"nothing is kept of request {name}")
        return self._rows.pop(full).whole()


def _places(blocks: np.ndarray, size: int, start: int, end: int) -> np.ndarray:
    """Cache positions of a request's tokens [start, end). blocks: its blocks of the cache, of `size` tokens each."""
    positions = np.arange(start, end)
    return blocks[positions // size] * np.int64(size) + positions % size
