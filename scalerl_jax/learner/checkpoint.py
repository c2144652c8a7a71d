"""Checkpoints of a run: written while training continues, found whole or not at all, read onto any mesh.

A checkpoint is three things: `state` (a tree of arrays, sharded as they are), `arrays` (named numpy arrays: the history
of each prompt, ...) and `manifest` (JSON). Orbax writes them; a step's folder gets its name when all of it is on disk,
so a run killed while it saves loses only that save.

Orbax notices files that are missing or cut short, but not a flipped bit: digests.py does.

A checkpoint that cannot be read is set aside (renamed, not deleted) and the one before it is used. A readable one of
another model is the user's mistake and is not moved. To resume from an older one, set aside the newer ones.

On several hosts all of them call the same methods with the same arguments, on one folder that all of them see; each
reads and writes what its devices hold, and they agree on which checkpoint can be read.

Left out on purpose: the trainer decides which steps are saved and what the manifest contains.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging as std_logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from flax import traverse_util
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext, PreservationPolicy

from scalerl_jax.learner.digests import compare, described, named
from scalerl_jax.system import files

Tree = Any

_MOST_STEPS = 64  # the newest ones, on which hosts agree
_CONCURRENT_GB = 2  # host memory that saving or restoring may hold at once


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The data saved under `step`."""

    step: int
    state: Tree
    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run, the newest `keep` of them; for the one process (or set of hosts) that writes them.

    `also`, on one host: from the steps of all, those that are kept besides the newest.
    """

    def __init__(self, directory: str, *, keep: int):
        self._directory = os.path.abspath(directory)
        self._keep = keep
        self.also: Callable[[Sequence[int]], Collection[int]] = lambda steps: ()
        self._opened: ocp.CheckpointManager | None = None
        self._failed = False

    def save(self, step: int, state: Tree, *, manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Starts to save and returns once `state` may be overwritten; waits first if the last save is not finished.

        A step that is saved already is left as it is. Raises the error of the save
        before it: files.WriteError on a full disk.
        """
        with self._faults():
            manager = self._manager()
            if step in manager.all_steps():
                return
            numpy_arrays = {name: np.asarray(x) for name, x in arrays.items()}
            record = {
                "manifest": dict(manifest),
                "state": described(state),
                "arrays": described(numpy_arrays),
            }
            record["sha256"] = hashlib.sha256(_canonical(record)).hexdigest()
            items: dict[str, Any] = {"state": ocp.args.StandardSave(state), "manifest": ocp.args.JsonSave(record)}
            stored = {name: x for name, x in numpy_arrays.items() if x.size}  # Orbax refuses empty ones
            if stored:
                items["arrays"] = ocp.args.StandardSave(stored)
            manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, abstract: Tree) -> Checkpoint | None:
        """The newest readable checkpoint, laid out as `abstract` (a tree of ShapeDtypeStruct); None: no save yet.

        Newer ones that cannot be read are set aside and logged. Raises ValueError, one line, if the checkpoint is of
        another model or optimizer, and if there are checkpoints but none can be read.
        """
        self.wait()
        found, broken = _newest_readable(self._directory, abstract)
        for step, why in broken.items() if jax.process_index() == 0 else ():
            aside = set_aside(self._directory, step, "unreadable")
            logging.warning("checkpoint %d cannot be read (%s): set aside as %s", step, why, os.path.basename(aside))
        if broken:
            _all_hosts(True)  # the folders have been renamed
        if broken and self._opened is not None:
            self._opened.reload()
        if broken and found is not None:
            logging.warning("going on from checkpoint %d, the one before", found.step)
        return found

    def wait(self) -> None:
        """Waits until the saves are on disk; raises the error of a failed one."""
        if self._opened is not None:
            with self._faults():
                self._opened.wait_until_finished()
                self._opened.check_for_errors()

    def close(self) -> None:
        """Waits for the current save. The error of a failed save is raised once, here or before."""
        if self._opened is None:
            return
        if self._failed:
            with contextlib.suppress(Exception):  # the same error again
                self._opened.close()
        else:
            self.wait()
            self._opened.close()
        self._opened = None

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Wraps writing: a disk that is full, read-only or gone raises WriteError."""
        try:
            yield
        except Exception as error:
            self._failed = True
            fault = files.write_error(error, self._directory)
            if fault is None:
                raise
            raise fault from None

    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            logging.get_absl_logger().addFilter(_raised_anyway)
            std_logging.getLogger("asyncio").addFilter(_raised_anyway)  # "never retrieved", of concurrent writes
            _drop_late_writes()
            handler = functools.partial(
                ocp.StandardCheckpointHandler, save_concurrent_gb=_CONCURRENT_GB, restore_concurrent_gb=_CONCURRENT_GB
            )
            self._opened = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_NewestAndMarked(self._keep, lambda steps: self.also(steps)),
                    cleanup_tmp_directories=True,
                ),
                item_handlers={"state": handler(), "arrays": handler(), "manifest": ocp.JsonCheckpointHandler()},
            )
        return self._opened


@dataclasses.dataclass(frozen=True)
class _NewestAndMarked(PreservationPolicy):
    """The checkpoints that Orbax leaves on disk: the newest `count`, and those of `also`."""

    count: int
    also: Callable[[Sequence[int]], Collection[int]]

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.count :], *self.also(steps)}
        return [step in kept for step in steps]


def _raised_anyway(record: std_logging.LogRecord) -> bool:
    """Whether a line is logged: errors of Orbax's threads are raised by wait(), once, without their traces."""
    where = record.pathname + record.getMessage()
    return not (record.exc_info and (f"{os.sep}orbax{os.sep}" in where or ".orbax-checkpoint-tmp" in where))


def _drop_late_writes() -> None:
    """If one write fails, Orbax closes its event loop, and concurrent writes, which end later, find it closed.

    tensorstore passes that to sys.unraisablehook, a trace for each write; it adds no information.
    """
    before = sys.unraisablehook
    if getattr(before, "drops_late_writes", False):
        return

    def hook(found: Any) -> None:
        if not (found.exc_type is RuntimeError and str(found.exc_value) == "Event loop is closed"):
            before(found)

    hook.drops_late_writes = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def read_newest(directory: str, part: str) -> Checkpoint:
    """The newest readable checkpoint, but only `part` of its state ("params"), on one device. Changes nothing on disk.

    Raises ValueError, one line, if there is none.
    """
    directory = os.path.abspath(directory)
    found, broken = _newest_readable(directory, None, part)
    if found is None:
        raise ValueError(f"{directory}: no checkpoint there")
    for step, why in broken.items():
        logging.warning("%s: checkpoint %d cannot be read (%s): taking the one before", directory, step, why)
    return found


def read_step(directory: str, part: str, step: int) -> Checkpoint:
    """As read_newest, for `step`."""
    path = os.path.join(os.path.abspath(directory), str(step))
    try:
        record = _read_record(path)
        with _quiet():
            found = _load(step, path, record, _expected(record, part))
            compare(found.state, record["state"])
            return found
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise ValueError(f"{path}: cannot be read ({_why(error)})") from error


def steps_there(directory: str) -> list[int]:
    """The steps of all checkpoints, readable or not, in order."""
    return sorted(ocp.utils.checkpoint_steps(directory)) if os.path.isdir(directory) else []


def newest_step(directory: str) -> int | None:
    """The step of the newest checkpoint, readable or not; None: no save yet."""
    return max(steps_there(directory), default=None)


def _newest_readable(directory: str, abstract: Tree | None, part: str = "") -> tuple[Checkpoint | None, dict[int, str]]:
    """(the newest readable checkpoint, newer broken ones: step -> why). Raises ValueError if all are broken."""
    broken: dict[int, str] = {}
    for step in reversed(_agreed(steps_there(directory))):
        path = os.path.join(directory, str(step))
        mismatch: str | None = None
        found: Checkpoint | None = None
        try:
            record = _read_record(path)
            wanted = _expected(record, part) if abstract is None else abstract
            mismatch = None if abstract is None else _mismatch(record, wanted)
            if mismatch is None:
                with _quiet():
                    found = _load(step, path, record, wanted)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # too little memory is not the checkpoint's fault
        except Exception as error:  # noqa: BLE001 (Orbax and tensorstore raise bare Exception, ValueError, KeyError, OSError)
            broken[step] = _why(error)
        if mismatch is not None:
            raise ValueError(f"{path}: {mismatch}")
        if not _all_hosts(found is not None):
            broken.setdefault(step, "another host cannot read it")
            continue
        try:  # by digests that all hosts compute together
            assert found is not None
            compare(found.state, record["state"])
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # noqa: BLE001  as above
            broken[step] = _why(error)
            continue
        return found, broken
    if broken:
        newest = next(iter(broken))
        raise ValueError(f"{directory}: none of its {len(broken)} checkpoints can be read ({newest}: {broken[newest]})")
    return None, broken


def _agreed(steps: list[int]) -> list[int]:
    """The steps that the first host sees: on a network file system others may see an older state."""
    if jax.process_count() == 1:
        return steps
    padded = np.full(_MOST_STEPS, -1, np.int64)
    padded[: len(steps[-_MOST_STEPS:])] = steps[-_MOST_STEPS:]
    halves = multihost_utils.broadcast_one_to_all(padded.view(np.int32))  # JAX has 32 bits
    return [step for step in np.asarray(halves).view(np.int64).tolist() if step >= 0]


def _all_hosts(good: bool) -> bool:
    """Whether it is true on each host; a barrier for the hosts."""
    if jax.process_count() == 1:
        return good
    return bool(multihost_utils.process_allgather(np.array(good)).all())


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses asyncio's "never retrieved" pages: after one failed read, concurrent reads end with them."""
    logger = std_logging.getLogger("asyncio")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    except BaseException as error:
        error.__traceback__ = None  # it keeps those reads alive
        gc.collect()
        raise
    finally:
        logger.disabled = disabled


def _read_record(path: str) -> dict[str, Any]:
    with open(os.path.join(path, "manifest", "metadata")) as file:
        record = json.load(file)
    if record.pop("sha256") != hashlib.sha256(_canonical(record)).hexdigest():
        raise OSError("the manifest's checksum is wrong")
    return record


def _load(step: int, path: str, record: dict[str, Any], abstract: Tree) -> Checkpoint:
    """The state as read, its digests unchecked. Raises any error of reading, and OSError if a digest of the arrays is
    wrong."""
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_CONCURRENT_GB)
    # Each host reads alone: if one of them found that it cannot, the others would wait for it.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"host-{jax.process_index()}",
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        stored = {name: x for name, x in record["arrays"].items() if 0 not in x[0]}
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype, _) in record["arrays"].items()}
        if stored:
            arrays |= reader.restore(
                os.path.join(path, "arrays"),
                args=ocp.args.PyTreeRestore(
                    item={name: arrays[name] for name in stored},
                    restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored},
                ),
            )
        compare(arrays, record["arrays"])
        state = reader.restore(
            os.path.join(path, "state"),
            args=ocp.args.PyTreeRestore(
                item=abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                partial_restore=True,
            ),
        )
    return Checkpoint(step, state, record["manifest"], arrays)


def _expected(record: dict[str, Any], part: str) -> Tree:
    """The saved tree below `part` (nested dicts, so its names are paths), to be read onto this host's first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
        for name, (shape, dtype, _) in record["state"].items()
        if name.split("/")[0] == part
    }
    return traverse_util.unflatten_dict(wanted, sep="/")


_OTHERS = "it is of another model, or an earlier version of scalerl-jax saved it"


def _mismatch(record: dict[str, Any], abstract: Tree) -> str | None:
    """The first difference between the saved state and the state the run needs, as a line; None without any."""
    needed = {name: (list(leaf.shape), str(leaf.dtype)) for name, leaf in named(abstract)}
    for name, (shape, dtype) in needed.items():
        if name not in record["state"]:
            return f"the checkpoint has no {name}, which this model and optimizer need: {_OTHERS}"
        if record["state"][name][:2] != [shape, dtype]:
            saved_shape, saved_dtype, _ = record["state"][name]
            return f"the checkpoint's {name} is {saved_dtype}{saved_shape}, this run's {dtype}{shape}"
    extra = next((name for name in record["state"] if name not in needed), None)
    return None if extra is None else f"the checkpoint has {extra}, which this model and optimizer lack: {_OTHERS}"


def set_aside(directory: str, step: int, why: str) -> str:
    """Renames a step's folder so that the step can be saved again; returns the new path. why: prefix of the new
    name."""
    number = 0
    while os.path.exists(aside := os.path.join(directory, f"{why}-{step}-{number}")):
        number += 1
    os.rename(os.path.join(directory, str(step)), aside)
    return aside


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
