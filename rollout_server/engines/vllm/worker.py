"""Extension of vLLM's workers: writes a version of the weights in place.

WeightAccess is mixed into vLLM's worker (worker_extension_cls); its methods are called through collective_rpc.
The server stages a version in memory that it shares with the workers (shared_memory.py). Each worker writes its own
part of each tensor to its place in vLLM's fused parameters (model/tensor_layout.py): the whole part, or the positions
that changed. No parameter is reallocated, so compiled graphs and tied embeddings stay valid.

A call that raises may have written in part. It is repeated, whole, before sampling resumes.

vLLM's processes end with the server, however it ended: vLLM itself leaves them behind when its parent is killed.

A thread of each worker waits for the end of the server's process. It then asks vLLM's engine process, the worker's
parent, to end, which also ends the workers and frees their shared resources; an engine process that does not end is
killed.
"""

import contextlib
import math
import mmap
import os
import select
import signal
import threading
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from rollout_server.engines.vllm import shared_memory
from rollout_server.engines.vllm.prompt_scores import PromptScores
from scalerl_jax.model.decoder_config import read_config
from scalerl_jax.model.tensor_layout import TensorPiece, pieces

# How long the engine process may take to end by itself.
GRACE_SECONDS = 10.0


def follow(server: int) -> None:
    """Ends this worker with the process `server`; returns at once. Raises OSError where there is no such process."""
    lifeline, parent = os.pidfd_open(server), os.getppid()
    engine = None if parent == server else os.pidfd_open(parent)
    threading.Thread(target=_follow, args=(lifeline, engine), name="lifeline", daemon=True).start()


def _follow(lifeline: int, engine: int | None) -> None:
    select.select([lifeline], [], [])
    if engine is not None:
        with contextlib.suppress(ProcessLookupError):  # already ended
            signal.pidfd_send_signal(engine, signal.SIGTERM)
            if not select.select([engine], [], [], GRACE_SECONDS)[0]:
                signal.pidfd_send_signal(engine, signal.SIGKILL)
    os._exit(1)


_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# name, offset of the tensor in the shared weights in bytes, [first, last) of its changed positions; None: all of it
Entry = tuple[str, int, tuple[int, int] | None]


class WeightAccess:
    """Methods mixed into vLLM's worker; the prefix avoids clashes with its own."""

    model_runner: Any
    model_config: Any

    def scalerl_prepare(self, sync_dtype: str, server: int) -> None:
        """Finds each tensor's place in the parameters, and rounds the loaded weights to the sync dtype.

        From here on the worker ends with the process `server`. Raises ValueError where vLLM's layout of the model
        differs from model/tensor_layout.py.
        """
        follow(server)
        config = read_config(self.model_config.model)
        rank, workers = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._scalerl_scores = PromptScores(self.model_runner)
        self._scalerl_sync_dtype = _DTYPES[sync_dtype]
        self._scalerl_pieces: dict[str, TensorPiece] = pieces(config, rank, workers)
        # In some releases experts' parameters are in a separate module.
        named = self.model_runner.model.named_parameters()
        self._scalerl_parameters = {name.replace(".routed_experts.", "."): p.data for name, p in named}
        self._scalerl_memory: tuple[tuple[str, int], mmap.mmap] | None = None
        for name, piece in self._scalerl_pieces.items():
            parameter = self._scalerl_parameters.get(piece.parameter)
            if parameter is None:
                raise ValueError(f"tensor {name}: this vLLM has no parameter {piece.parameter}")
            rows, *rest = parameter.shape
            # Extra rows may only be the padding of the vocabulary.
            padded = rows > piece.size[0] and ("embed" in name or "head" in name)
            if not parameter.is_contiguous() or (rows != piece.size[0] and not padded) or tuple(rest) != piece.size[1:]:
                raise ValueError(f"tensor {name}: {piece.parameter} has shape {list(parameter.shape)} in this vLLM")
        held = {piece.parameter for piece in self._scalerl_pieces.values()}
        for name, parameter in self._scalerl_parameters.items():
            if name not in held:
                raise ValueError(f"parameter {name} of this vLLM is no tensor's")
            parameter.copy_(parameter.to(self._scalerl_sync_dtype))

    def scalerl_load(self, weights_path: str, positions_path: str | None, entries: list[Entry]) -> None:
        """Writes the tensors of `entries`.

        Args:
          weights_path: shared memory with every tensor, in sync dtype.
          positions_path: shared memory with the positions of all changes, int64; None without positions.
        """
        weights = self._scalerl_weights(weights_path)
        positions = np.zeros(0, np.int64)
        if positions_path is not None:
            positions = np.frombuffer(shared_memory.attach(positions_path), np.int64)
        for name, offset, changed in entries:
            piece = self._scalerl_pieces[name]
            parameter = self._scalerl_parameters[piece.parameter]
            whole = torch.frombuffer(
                weights, dtype=self._scalerl_sync_dtype, count=math.prod(piece.shape), offset=offset
            )
            if changed is None:
                parameter[piece.target].copy_(whole.view(piece.shape)[piece.source])
            else:
                mine = positions[slice(*changed)]
                held, targets = piece.scatter(mine)
                values = whole[torch.from_numpy(mine[held])].to(parameter.device, parameter.dtype)
                parameter.view(-1)[torch.from_numpy(targets).to(parameter.device)] = values
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def scalerl_held(self, name: str) -> bytes:
        """This worker's part of a tensor, read from the model, in sync dtype, row-major."""
        piece = self._scalerl_pieces[name]
        part = self._scalerl_parameters[piece.parameter][piece.target].to("cpu", self._scalerl_sync_dtype).contiguous()
        return part.view(torch.uint8).numpy().tobytes()

    def scalerl_scored(self, name: str) -> tuple[bytes, ...]:
        """The scores of the request `name`; they are dropped here."""
        return self._scalerl_scores.pop(name)

    def _scalerl_weights(self, path: str) -> mmap.mmap:
        """Maps the shared weights, once: mapping many GB is slow."""
        identity = shared_memory.identity(path)
        if self._scalerl_memory is None or self._scalerl_memory[0] != identity:
            self._scalerl_memory = (identity, shared_memory.attach(path))
        return self._scalerl_memory[1]
