"""A host that is not the first: it runs the first one's commands (lead.py) on its devices, and nothing else.

It owns no fleet, no ledger and no logs. It reads the model and the checkpoints from the folders that the first host
has, sends its part of each version to the servers itself, and ends when the first host ends it.
"""

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from scalerl_jax import config_io
from scalerl_jax.config import Config, ObjectiveConfig, OptimizerConfig
from scalerl_jax.contract import security
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.weight_parts import Part
from scalerl_jax.hosts.lead import MORE, NEXT, Received, fault_of
from scalerl_jax.hosts.link import Frame, OtherHost
from scalerl_jax.hosts.rank import Rank
from scalerl_jax.learner import memory_estimate
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.trainer import Pending, Trainer
from scalerl_jax.model.decoder_config import check_folder, read_config
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.rollouts.loop_thread import LoopThread, watched
from scalerl_jax.rollouts.weights.host_parts import PartPublisher, PartPush
from scalerl_jax.rollouts.weights.push import PushRefused

SEEN_SECONDS = 65.0  # NFS caches what it knows of a file for up to a minute


class _Sender:
    """Sends this host's parts of versions, on a separate thread."""

    def __init__(
        self, config: Config, trainer: Trainer, rank: Rank, other: OtherHost, credentials: security.Credentials
    ):
        self._other, self._credentials = other, credentials
        self._stubs: dict[str, tuple[Any, Stub]] = {}
        self._pushing: dict[str, asyncio.Task[None]] = {}  # the last one to each server, by its address
        self._thread = LoopThread("parts")
        self._to_host = ThreadPoolExecutor(1, thread_name_prefix="parts-to-host")
        self._publisher = PartPublisher(
            Part(rank.index, rank.count),
            dtype=trainer.sync_dtype,
            shapes=hf_tensors(trainer.decoder),
            connect=self._connect,
            chunk_bytes=config.fleet.chunk_bytes,
            delta_bytes=config.fleet.delta_cache_bytes,
            to_host=lambda make: asyncio.get_running_loop().run_in_executor(self._to_host, make),
            fail=self._fail,
        )
        self._thread.start(list)

    def publish(self, *version: Any) -> None:
        self._thread.call(self._publisher.publish, *version)

    def push(self, frame: Frame) -> None:
        """Called on the line's thread."""
        self._thread.post(self._begin_push, frame)

    def keep(self, frame: Frame) -> None:
        """Called on the line's thread."""
        self._thread.post(self._publisher.keep, frame.fields["until"], frame.fields["steps"])

    def close(self) -> None:
        self._thread.close()
        self._publisher.close()
        self._to_host.shutdown(wait=False, cancel_futures=True)

    def _connect(self, address: str) -> Stub:
        if address not in self._stubs:
            channel = security.connect(address, self._credentials)
            self._stubs[address] = channel, Stub(channel)
        return self._stubs[address][1]

    def _begin_push(self, frame: Frame) -> None:
        address = frame.fields["address"]
        if address in self._pushing:  # the first host has given up the previous push, or it has ended
            self._pushing[address].cancel()
        self._pushing[address] = watched(self._push(frame), self._fail)

    async def _push(self, frame: Frame) -> None:
        fields = {name: value for name, value in frame.fields.items() if name != "number"}
        try:
            report = await self._publisher.push(PartPush(**fields))
        except (PushRefused, TimeoutError, grpc.aio.AioRpcError) as error:
            self._other.reply(frame, fault_of(error))
        else:
            self._other.reply(frame, {"report": dataclasses.asdict(report)})

    def _fail(self, error: BaseException) -> None:
        self._other.leave(f"{type(error).__name__}: {error}")


def follow(*, rank: Rank, other: OtherHost, workdir: str, credentials: security.Credentials) -> int:
    """Runs until the first host ends; returns the exit code. Raises ValueError on a user's mistake on this host."""
    frame = other.next()
    if frame.kind == "end":
        return _ended(frame)
    assert frame.kind == "begin", frame.kind
    config, maximum_tokens = config_io.from_json(frame.fields["config"]), frame.fields["maximum_tokens"]
    _check_workdir(workdir, frame.fields["incarnation"])
    with contextlib.ExitStack() as stack:
        check_folder("config.model.path", config.model.path)
        decoder = read_config(config.model.path)
        trainer = make_trainer(config, decoder, max_segment=maximum_tokens)
        checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), keep=config.checkpoint.keep)
        stack.callback(checkpoints.close)
        trainer.restore(checkpoints, begin=lambda dtype: load_hf(config.model.path, trainer.mesh, dtype)[1])
        memory_note = memory_estimate.check_memory(
            trainer, longest=maximum_tokens, refuse=config.learner.too_little_memory == "refuse"
        )
        print(f"host {rank.index} of {rank.count}: {memory_note}", file=sys.stderr)
        sender = _Sender(config, trainer, rank, other, credentials)
        stack.callback(sender.close)
        other.on("push", sender.push)
        other.on("keep", sender.keep)
        return _loop(other, trainer, checkpoints, sender)


class _DroppedError(Exception):
    """The first host drops the rest of a gradient; `frame` is its next command."""

    def __init__(self, frame: Frame):
        self.frame = frame


def _loop(other: OtherHost, trainer: Trainer, checkpoints: Checkpoints, sender: _Sender) -> int:
    received, dropped_for = Received(), None
    pending: Pending | None = None

    def before_micro_batch() -> None:
        frame = other.next()
        if frame.kind != NEXT:
            raise _DroppedError(frame)

    while True:
        frame, dropped_for = dropped_for or other.next(), None
        match frame.kind:
            case "end":
                return _ended(frame)
            case kind if kind == MORE:
                received.add(frame)
            case "forward_backward":
                # A gradient is as large as the parameters: free it before the next one.
                add_to, pending = (pending if frame.fields["add"] else None), None
                segments, beside = received.finish(frame)
                values = frame.fields["objective"]
                try:
                    pending = trainer.forward_backward(
                        segments, beside=beside, objective=ObjectiveConfig(**values) if values is not None else None,
                        add_to=add_to, before_micro_batch=before_micro_batch,
                    )  # fmt: skip
                except _DroppedError as dropped:
                    dropped_for = dropped.frame
            case "optim_step":
                assert isinstance(pending, Pending)
                rate, values = frame.fields["learning_rate"], frame.fields["optimizer"]
                optimizer = OptimizerConfig(**values) if values is not None else None
                try:
                    trainer.optim_step(pending, learning_rate=rate, optimizer=optimizer)
                except FloatingPointError:
                    # The first host has the same norm, and ends all with its code once it has written the reason down.
                    while (frame := other.next()).kind != "end":
                        pass
                    return _ended(frame)
            case "score":
                trainer.score(received.finish(frame)[0])
            case "version":
                sender.publish(*trainer.version(frame.fields["step"]))
            case "save":
                fields = frame.fields
                trainer.save(checkpoints, fields["step"], manifest=fields["manifest"], arrays=frame.arrays)
            case "push":  # of both only those that arrived before the line's thread handled them
                sender.push(frame)
            case "keep":
                sender.keep(frame)
            case _:
                raise AssertionError(frame.kind)


def _ended(frame: Frame) -> int:
    if frame.fields["line"]:
        print(f"the first host ended: {frame.fields['line']}", file=sys.stderr)
    return int(frame.fields["code"])


def _read(path: str) -> str:
    """Empty if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _check_workdir(workdir: str, incarnation: int) -> None:
    """The first host has just written its incarnation there; a network file system may show it a little later."""
    until = time.monotonic() + SEEN_SECONDS
    while (written := _read(os.path.join(workdir, "incarnation"))) != str(incarnation) and time.monotonic() < until:
        time.sleep(0.5)
    if written != str(incarnation):
        raise ValueError(f"--workdir={workdir}: not the folder that the first host writes to; all hosts must share it")
