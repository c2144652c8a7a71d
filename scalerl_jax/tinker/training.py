"""Training runs: the calls of each in the order of their numbers, on a separate thread, one run at a time.

    a run         trainer, state, the gradient accumulated since the last step
    in order      call n + 1 begins when n is answered; those that arrive early wait in the store
    checkpoint    of the state after an optimizer step, once SAVE_SECONDS have passed since the last one. A run that
                  resumes, after a kill or after another one had the mesh, restores it and repeats the calls after it
    the mesh      holds one run. Another run that has a call gets it when the first was idle for IDLE_SECONDS

Stored answers do not change when calls are repeated. A step whose gradient is not finite is answered with an error, and
the run continues without it.
"""

import dataclasses
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scalerl_jax.config import Config, LoraConfig
from scalerl_jax.gateway.wire import ApiError
from scalerl_jax.learner.checkpoint import Checkpoints, newest_step
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.trainer import Pending, Trainer
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.tinker import tinker_wire
from scalerl_jax.tinker.store import Future, Store
from scalerl_jax.tinker.tinker_wire import RefusedCall

_log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
IDLE_SECONDS = 3.0
ALPHA = 32.0  # of every adapter, as the protocol has it
KEPT = 8  # saves of a run, for samplers, that have no name any longer or had none
TRAINED = "train_attn", "train_mlp", "train_unembed"  # fields of lora_config; null is true
_ATTENTION, _MLP = "q_proj,k_proj,v_proj,o_proj", "gate_proj,up_proj,down_proj"


def targets_of(lora: Mapping[str, Any], decoder: DecoderConfig) -> str:
    """The targets, in config.lora's form. Raises RefusedCall."""
    attention, mlp, head = (lora.get(name) is not False for name in TRAINED)
    names = ["all-linear"] if attention and mlp else [_ATTENTION] * attention + [_MLP] * mlp
    if head and not decoder.tied_embeddings:
        names.append("lm_head")
    if not names:
        raise RefusedCall("lora_config: it trains nothing")
    return ",".join(names)


@dataclasses.dataclass
class _TrainingRun:
    """The run that has the mesh."""

    id: str
    trainer: Trainer
    checkpoints: Checkpoints
    saved: int  # the number of the last call in the newest checkpoint
    saved_at: float
    pending: Pending | None = None


class Training:
    """Training of one base model. `answered` is called on the training thread with each answered call."""

    def __init__(
        self,
        config: Config,
        decoder: DecoderConfig,
        *,
        folder: str,
        longest: int,
        answered: Callable[[Future], None],
        fail: Callable[[BaseException], None],
    ):
        """longest: tokens of a datum and its last target. fail: called with errors that are not a client's."""
        self._config, self._decoder, self._folder, self._longest = config, decoder, folder, longest
        self._answered, self._fail = answered, fail
        self._something, self._over = threading.Event(), False
        self._trainers: dict[tuple[int, str, int], Trainer] = {}  # at most one
        self._run: _TrainingRun | None = None
        self.holder = ""  # the run that has the mesh
        self._thread = threading.Thread(target=self._work, name="training", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Called when there is a new call."""
        self._something.set()

    def close(self) -> None:
        """Ends after the current call, with a checkpoint."""
        self._over = True
        self.wake()
        self._thread.join()

    # ---- the thread

    def _work(self) -> None:
        try:
            self._store = Store(self._folder)
            idle_since = time.monotonic()
            while not self._over:
                self._something.clear()
                future = self._next(time.monotonic() - idle_since)
                if future is None:
                    self._something.wait(IDLE_SECONDS / 4)
                    continue
                self._answer(future)
                idle_since = time.monotonic()
            self._leave()
            self._store.close()
        except BaseException as error:  # noqa: BLE001  whatever it is: it is raised where it ends the server
            self._fail(error)

    def _next(self, idle: float) -> Future | None:
        """The call to compute now."""
        waiting = self._store.waiting()
        run = self._run
        if run is not None and run.id in waiting and (future := self._store.next_call(run.id)) is not None:
            return future
        if run is not None and idle < IDLE_SECONDS:
            return None
        for model in waiting:
            if (future := self._store.next_call(model)) is not None:
                return future
        return None

    def _answer(self, future: Future) -> None:
        try:
            run = self._taken_up(future.owner)
            answer, proto = self._compute(run, future)
        except (ApiError, ValueError, FloatingPointError) as error:  # the client's
            if not isinstance(error, (ApiError, RefusedCall)):
                _log.warning("%s call %d, %s: %s", future.owner, future.seq, future.kind, error)
            self._store.refuse(future, str(error), category="user")
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:  # noqa: BLE001  it ends neither other clients' calls nor each start after this one
            _log.exception("%s call %d, %s", future.owner, future.seq, future.kind)
            self._free()
            self._store.refuse(future, f"{future.kind}: the server failed: {error!r}", category="server")
        else:
            self._store.answer(future, answer if proto else json.dumps(answer).encode(), proto=proto)
            if future.kind == "optim_step":
                self._save(run, future.seq)
        self._answered(future)

    def _compute(self, run: _TrainingRun, future: Future) -> tuple[Any, bool]:
        """(the answer, whether it is protobuf's)"""
        if future.kind == "forward_backward":
            return self._forward_backward(run, future.body), True
        if future.kind == "optim_step":
            return {"metrics": self._step(run, future)}, False
        if future.kind == "save_weights":
            return self._save_weights(run, future), False
        if future.kind == "save_weights_for_sampler":
            return self._save_for_sampler(run, future), False
        if future.kind not in ("create_model", "load_weights"):
            raise RefusedCall(f"{future.kind} is not offered")
        path = {"path": tinker_wire.path_to_load(future.fields)} if future.kind == "load_weights" else {}
        if path and future.seq > run.saved:  # into an existing run; or a kill came before the answer
            self._load(run, future.fields, future.seq)
        return {**path, "model_id": future.owner, "type": future.kind}, False

    # ---- loading a run

    def _taken_up(self, model: str) -> _TrainingRun:
        """Gives the run the mesh, and returns it."""
        if self._run is not None and self._run.id == model:
            return self._run
        self._leave()
        began = time.monotonic()
        row = self._store.row("models", model)
        assert row is not None
        body = json.loads(row["body"])
        lora = body.get("lora_config") or {}
        trainer = self._trainer(row["rank"], targets_of(lora, self._decoder) if row["rank"] else "", row["seed"])
        checkpoints = Checkpoints(self._place(model, "state"), keep=1)
        found = trainer.restore(checkpoints, begin=self._begin(trainer))
        saved = int(found.manifest["call"]) if found is not None else 0
        run = _TrainingRun(model, trainer, checkpoints, saved, time.monotonic())
        if found is None and "path" in body:
            self._load(run, body, 0)
        for future in self._store.answered_after(model, saved):
            self._again(run, future)
        self._run, self.holder = run, model
        _log.info("%s has the mesh, from call %d, in %.1f s", model, saved, time.monotonic() - began)
        return run

    def _again(self, run: _TrainingRun, future: Future) -> None:
        """Repeats the state change of an answered call."""
        if future.kind == "optim_step":
            if not future.failed:
                self._step(run, future)
            elif run.pending is not None and _is_step(future):  # its gradient was not finite
                run.pending = None
        elif future.failed:
            return
        elif future.kind == "forward_backward":
            if not tinker_wire.parse(future.body).forward_only:
                self._forward_backward(run, future.body)
        elif future.kind == "load_weights" and future.seq:
            self._load(run, future.fields, future.seq)

    def _trainer(self, rank: int, targets: str, seed: int) -> Trainer:
        key = (rank, targets, seed if rank else 0)
        if key not in self._trainers:
            self._trainers.clear()
            lora = LoraConfig(rank=rank, alpha=ALPHA, targets=targets) if rank else LoraConfig()
            config = dataclasses.replace(self._config, lora=lora, seed=seed)
            self._trainers[key] = make_trainer(config, self._decoder, max_segment=self._longest)
        return self._trainers[key]

    def _begin(self, trainer: Trainer) -> Callable[[Any], Any]:
        return lambda dtype: load_hf(self._config.model.path, trainer.mesh, dtype)[1]

    def _load(self, run: _TrainingRun, body: Mapping[str, Any], call: int) -> None:
        """Loads the state saved under a path, by this call, and saves it: what is under the path may change.

        Raises ValueError if there is none, or it is of another kind.
        """
        row = self._store.row("checkpoints", body["path"])
        if row is None or row["kind"] != "training" or newest_step(row["folder"]) is None:
            raise RefusedCall(f"path: {body['path']} is no checkpoint of a training run")
        there = Checkpoints(row["folder"], keep=1)
        found = run.trainer.restore(there, begin=self._begin(run.trainer))
        there.close()
        assert found is not None
        run.pending = None
        if not body["optimizer"]:
            run.trainer.start(found.state["params"], run.trainer.frozen or None)
        self._save(run, call, at_once=True)
        run.checkpoints.wait()

    def _leave(self) -> None:
        """Saves the run that has the mesh if possible, and frees the mesh."""
        if (run := self._run) is not None:
            done = self._store.done(run.id)
            if run.pending is None and done > run.saved:
                self._save(run, done, at_once=True)
        self._free()

    def _free(self) -> None:
        """Frees the mesh. The run that has it is restored from its checkpoint when it has another call."""
        run, self._run, self.holder = self._run, None, ""
        if run is not None:
            run.checkpoints.close()
            run.trainer.state = {}

    def _save(self, run: _TrainingRun, call: int, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - run.saved_at < SAVE_SECONDS:
            return
        run.checkpoints.wait()
        self._store.forget_bodies(run.id, run.saved)  # of the previous checkpoint, which is on the disk
        self._store.sync()  # a checkpoint must not contain calls that are not stored as answered
        run.trainer.save(run.checkpoints, call, manifest={"call": call}, arrays={})
        run.saved, run.saved_at = call, time.monotonic()

    # ---- the calls

    def _forward_backward(self, run: _TrainingRun, body: bytes) -> bytes:
        asked = tinker_wire.pass_of(tinker_wire.parse(body), vocabulary=self._decoder.vocab_size, longest=self._longest)
        if asked.forward_only and asked.soft:  # its program is part of a gradient's, which is dropped
            logprobs = run.trainer.forward_backward(asked.segments, objective=asked.objective).logprobs()
        elif asked.forward_only:
            logprobs = run.trainer.score(asked.segments)
        else:
            run.pending = run.trainer.forward_backward(asked.segments, objective=asked.objective, add_to=run.pending)
            logprobs = run.pending.logprobs()
        loss = tinker_wire.loss_of(asked, logprobs)
        counted = sum(int(np.count_nonzero(segment.weights)) for segment in asked.segments)
        return tinker_wire.output_of(asked, logprobs, {"loss:sum": loss, "loss_tokens:sum": counted})

    def _step(self, run: _TrainingRun, future: Future) -> dict[str, float]:
        optimizer, rate = tinker_wire.optimizer_of(future.fields)
        if run.pending is None:
            raise RefusedCall("optim_step: there is no gradient: forward_backward comes first")
        pending, run.pending = run.pending, None
        try:
            sums = run.trainer.optim_step(pending, optimizer=optimizer, learning_rate=rate)
        except FloatingPointError:
            self._free()
            raise
        return {"grad_norm:mean": sums["gradient_norm"], "micro_batches:sum": float(sums["micro_batches"])}

    def _save_weights(self, run: _TrainingRun, future: Future) -> dict[str, Any]:
        body, name = future.fields, tinker_wire.name_of_save(future.fields)
        if name is None:
            raise RefusedCall("path: is missing")
        path, folder = f"tinker://{run.id}/weights/{name}", self._place(run.id, "weights", name)
        there = self._store.row("checkpoints", path)
        if there is not None and json.loads(there["body"]).get("call") != future.seq:
            if not body.get("overwrite"):
                raise RefusedCall(f"path: {path} is there already")
            shutil.rmtree(folder, ignore_errors=True)
        checkpoints = Checkpoints(folder, keep=1)
        run.trainer.save(checkpoints, future.seq, manifest={"call": future.seq}, arrays={})
        checkpoints.close()
        self._keep(run, path, "training", folder, future)
        return {"path": path, "type": "save_weights"}

    def _save_for_sampler(self, run: _TrainingRun, future: Future) -> dict[str, Any]:
        body = future.fields
        name, inflight = tinker_wire.name_of_save(body), body.get("kind") == "inflight"
        # No two saves have one folder, whatever their names: samplers know weights by it.
        folder = self._place(run.id, "snapshots", f"{future.seq}-{name}" if name else future.seq)
        row = self._store.row("models", run.id)
        assert row is not None
        sampler, followed = f"{row['session']}:sample:{body.get('sampling_session_seq_id')}", "" if inflight else folder
        there = None if name else self._store.row("samplers", sampler)
        if there is not None and (there["model"], there["folder"]) != (run.id, followed):
            raise RefusedCall(f"sampling_session_seq_id: {sampler} is another sampling session")
        write_model_folder(
            folder, params=run.trainer.policy, decoder=self._decoder, tokenizer_dir=self._config.model.path,
            dtype=self._config.model.sync_dtype, replace=True,
        )  # fmt: skip
        answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
        if name:
            path = f"tinker://{run.id}/sampler_weights/{name}"
            self._keep(run, path, "sampler", folder, future)
            self._drop_snapshots(run.id)
            return {**answer, "path": path}
        with self._store.writing():
            self._store.put("samplers", id=sampler, session=row["session"], model=run.id, folder=followed)
            if inflight:
                self._store.set("models", run.id, inflight=folder)
        self._drop_snapshots(run.id)
        return {**answer, "sampling_session_id": sampler}

    def _keep(self, run: _TrainingRun, path: str, kind: str, folder: str, future: Future) -> None:
        size = sum(os.path.getsize(os.path.join(at, file)) for at, _, files in os.walk(folder) for file in files)
        body, ttl = future.fields, future.fields.get("ttl_seconds")
        self._store.put(
            "checkpoints", id=path, model=run.id, kind=kind, folder=folder, created=time.time(), bytes=size,
            body=json.dumps({"user_metadata": body.get("user_metadata"), "call": future.seq}),
            expires=time.time() + ttl if ttl else None,
        )  # fmt: skip

    def _drop_snapshots(self, model: str) -> None:
        """Deletes the oldest ones that nothing waits for."""
        folder = self._place(model, "snapshots")
        there = [name for name in os.listdir(folder) if name.partition("-")[0].isdecimal()]
        there.sort(key=lambda name: int(name.partition("-")[0]), reverse=True)
        row = self._store.row("models", model)
        asked = {one.owner for one in self._store.unanswered("asample")}
        used = {one["folder"] for one in self._store.rows("samplers", model=model) if one["id"] in asked}
        named = {one["folder"] for one in self._store.rows("checkpoints", model=model)}
        unnamed = [path for name in there if (path := os.path.join(folder, name)) not in named]
        for path in unnamed[KEPT:]:
            if row is not None and path != row["inflight"] and path not in used:
                shutil.rmtree(path)

    def _place(self, model: str, *parts: Any) -> str:
        return os.path.join(self._folder, "models", model.replace(":", "-"), *map(str, parts))


def _is_step(future: Future) -> bool:
    """Whether an optimizer step could be made by its fields."""
    try:
        tinker_wire.optimizer_of(future.fields)
    except (ApiError, RefusedCall):
        return False
    return True
