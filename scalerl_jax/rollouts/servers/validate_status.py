"""Plausibility checks of a server's status. Pure: the caller passes the times.

    every number          finite, not negative, below an absurd size
    counters              of one process (server_id) never fall; busy seconds are part of the seconds it is up
    up_seconds            grows no more than the clock, since the last status and since the first one in a row
    busy_seconds          likewise, and what a long step adds at its end
    tokens                no more than the fastest machine produces in that time
    devices               as when the process was met
    version               not newer than the newest one published

A process's monotonic clock stops while its machine sleeps, so its seconds may grow less than ours; ours must count our
own sleep (`clock`). If our machine stopped in a way that `clock` does not count (a paused virtual machine), a server is
found implausible once: the next status is compared with the last one heard, believed or not.

Usage between a dropped status and the next valid one is not booked, nor is what a process claims to have done before
its predecessor on the same address was last heard: `Found.from_here` marks both.

`compare` checks what a run requires: tokenizer fingerprint, the decoder's shape, dtype of the logits, precision of the
head's operands (a server that does not report it is left to the comparison of log-probs, parity.py), dtype of the
weights, and capacity for the longest completion. A server that fails is rejected with one line.
"""

import dataclasses
import math
import time

from scalerl_jax.contract import peer_text
from scalerl_jax.contract import rollout_pb2 as pb

MAXIMUM_DEVICES = 4096  # of one server process
MAXIMUM_PLACES = 2**20  # slots, and places in the queue
MAXIMUM_SECONDS = 1e9  # thirty years
MAXIMUM_NAME = 256  # characters of server_id
CLOCK_SLACK = 2.0  # seconds between two machines' ideas of an interval
CLOCK_DRIFT = 0.01  # of the interval
STEP_SECONDS = 120.0  # an engine adds a step's seconds and tokens when the step ends; compiling is part of the first
SAMPLED_PER_SECOND = 1e7  # tokens per device, sampled and forced; a thousand times a small model's on a fast one
PREFILL_PER_SECOND = 1e9

_SECONDS = ("up_seconds", "busy_seconds", "pause_seconds")
_TOKENS = (
    ("sampled_tokens", SAMPLED_PER_SECOND),
    ("forced_tokens", SAMPLED_PER_SECOND),
    ("prefill_tokens", PREFILL_PER_SECOND),
)
_COUNTERS = (*_SECONDS, *(name for name, _ in _TOKENS), "versions_applied", "chunks_refused")
# Includes the seconds of this machine's sleep, which time.monotonic leaves out on Linux.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Monotonic seconds that continue while this machine sleeps."""
    return time.clock_gettime(_CLOCK)


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of checking a status."""

    lie: str = ""  # what is implausible, then the status must be dropped; empty: it is believed
    from_here: bool = False  # book usage from this status on only: usage before it is not known


@dataclasses.dataclass(frozen=True)
class _Heard:
    status: pb.StatusReply
    asked_at: float  # clock() when it was requested; its values are from this moment or later


class StatusCheck:
    """Checks the statuses of one address."""

    def __init__(self) -> None:
        self._before: _Heard | None = None  # the last that can be compared with another one
        self._since: _Heard | None = None  # the first of those believed in a row, of the same process
        self._dropped = False  # whether a status was dropped since the last valid one

    def check(self, status: pb.StatusReply, *, asked_at: float, heard_at: float, newest: int | None = None) -> Found:
        """Whether to believe a status. asked_at, heard_at: clock() before and after the call.

        newest: version of this trainer that a server can hold at most; None: not known.
        """
        lie = _by_itself(status) or _version(status, newest)
        if lie:
            self._dropped = True
            return Found(lie)  # later ones are not compared with it
        before, heard = self._before, _Heard(_copy(status), asked_at)
        same = before is not None and before.status.server_id == status.server_id
        if before is not None and self._since is not None and same:
            lie = _since(before.status, status, heard_at - before.asked_at)
            lie = lie or _clock(self._since.status, status, heard_at - self._since.asked_at)
        self._before = heard
        if lie or not same:
            self._since = heard
        if lie:
            self._dropped = True
            return Found(lie)
        dropped, self._dropped = self._dropped, False
        if same:
            return Found(from_here=dropped)
        # A step's seconds have passed before it adds them: when first met, none is busy for longer than it is up.
        most = status.up_seconds + CLOCK_SLACK
        if before is not None:  # it was started after its predecessor was last heard, so it is not older than that
            most = min(most, _at_most(heard_at - before.asked_at))
        return Found(from_here=dropped or max(status.up_seconds, status.busy_seconds) > most)


def _at_most(seconds: float) -> float:
    """The longest that another machine's clock may measure for an interval of ours."""
    return seconds * (1 + CLOCK_DRIFT) + CLOCK_SLACK


def _by_itself(status: pb.StatusReply) -> str:
    for name in _SECONDS:
        value = getattr(status, name)
        if not math.isfinite(value) or not 0 <= value <= MAXIMUM_SECONDS:
            return f"{name} is {value:g}"
    if not 0 < len(status.server_id) <= MAXIMUM_NAME:
        return f"server_id has {len(status.server_id)} characters"
    if not 1 <= status.devices <= MAXIMUM_DEVICES:
        return f"devices is {status.devices}"
    if not 1 <= status.slots <= MAXIMUM_PLACES or status.queue_capacity > MAXIMUM_PLACES:
        return f"slots is {status.slots}, queue_capacity {status.queue_capacity}"
    places = status.slots + status.queue_capacity
    if status.busy_slots > status.slots or status.busy_slots + status.queued > places:
        return f"{status.busy_slots} slots are busy and {status.queued} completions wait, of {places} places"
    up = status.up_seconds + STEP_SECONDS
    for name in ("busy_seconds", "pause_seconds"):
        if getattr(status, name) > up:
            return f"{name} is {getattr(status, name):g}, and it is up for {status.up_seconds:g} s"
    for name, speed in _TOKENS:
        if getattr(status, name) > speed * status.devices * up:
            return f"{name} is {getattr(status, name)} after {status.up_seconds:g} s on {status.devices} devices"
    return ""


def _version(status: pb.StatusReply, newest: int | None) -> str:
    step = status.version.step
    if step < 0 or (newest is not None and step > newest):
        return f"it holds version {step}" + (f", and the newest there is is {newest}" if newest is not None else "")
    return ""


def _since(before: pb.StatusReply, status: pb.StatusReply, elapsed: float) -> str:
    if status.devices != before.devices:
        return f"devices is {status.devices}, it was {before.devices}"
    for name in _COUNTERS:
        if getattr(status, name) < getattr(before, name):
            return f"{name} fell from {getattr(before, name):g} to {getattr(status, name):g}"
    most = _at_most(elapsed)
    for name in _SECONDS:
        grown = getattr(status, name) - getattr(before, name)
        if grown > most + (0 if name == "up_seconds" else STEP_SECONDS):
            return f"{name} grew by {grown:g} in {elapsed:.1f} s"
    for name, speed in _TOKENS:
        grown = getattr(status, name) - getattr(before, name)
        if grown > speed * status.devices * (most + STEP_SECONDS):
            return f"{name} grew by {grown} in {elapsed:.1f} s"
    return ""


def _clock(first: pb.StatusReply, status: pb.StatusReply, elapsed: float) -> str:
    """The slack is shared by all statuses in a row: a clock a little too fast at each of them is too fast."""
    grown = status.up_seconds - first.up_seconds
    return f"up_seconds grew by {grown:g} in {elapsed:.1f} s" if grown > _at_most(elapsed) else ""


def _copy(status: pb.StatusReply) -> pb.StatusReply:
    """The compared fields, without the strings that a server may make arbitrarily long."""
    kept = pb.StatusReply(server_id=status.server_id, devices=status.devices)
    for name in _COUNTERS:
        setattr(kept, name, getattr(status, name))
    return kept


# ---- what a server of this run must have -----------------------------------------------------------------------------


class FleetError(ValueError):
    """The servers given cannot be used; the message is one line."""


class ProbeError(ValueError):
    """The server would run another policy than the trainer; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the trainer has; a server must have the same."""

    tokenizer_fingerprint: str
    model_config: str  # canonical JSON
    sync_dtype: str
    head_precision: str = "default"  # default | highest | bfloat16: the logits are rounded to it
    maximum_tokens: int = 0  # longest prompt and completion together; the server must hold at least this much
    router_replay: bool = False  # the server must be able to return the experts of its completions
    experts: bool = False  # the decoder has some: two sides in bfloat16 may choose different ones
    numerics: str = "fast"  # or bitwise: the server must compute the same bits
    top_k: int = 0  # the server must be able to return the log-probs of that many ids at a token


def compare(server: str, status: pb.StatusReply, expected: Expected) -> None:
    """Raises ProbeError naming the first thing that differs."""
    if status.tokenizer_fingerprint != expected.tokenizer_fingerprint:
        raise ProbeError(
            f"server {server}: its tokenizer ({_short(status.tokenizer_fingerprint)}) is not the trainer's "
            f"({_short(expected.tokenizer_fingerprint)}); serve the folder that the trainer starts from"
        )
    for what, theirs, ours, flag in (
        ("model config", status.model_config, expected.model_config, ""),
        # A server older than this field does not report it.
        ("head precision", status.head_precision or expected.head_precision, expected.head_precision, "head_precision"),
        ("head dtype", status.head_dtype, "bfloat16" if expected.head_precision == "bfloat16" else "float32", ""),
        ("wire dtype", status.sync_dtype, expected.sync_dtype, "sync_dtype"),
    ):
        if theirs != ours:
            hint = f"; start it with --{flag}={ours}" if flag else ""
            raise ProbeError(
                f"server {server}: its {what} is {peer_text.printable(theirs) or 'unknown'}, "
                f"the trainer's is {ours}{hint}"
            )
    if expected.numerics == "bitwise":
        _compare_numerics(server, status)
    if status.maximum_tokens < expected.maximum_tokens:
        raise ProbeError(
            f"server {server}: holds {status.maximum_tokens} tokens of prompt and completion, the run needs up to "
            f"{expected.maximum_tokens} (longest prompt, thinking and answer budgets, interruption phrase); "
            "its flag is --maximum_tokens"
        )
    if expected.router_replay and not status.router_replay:
        raise ProbeError(
            f"server {server}: config.rollout.router_replay needs the experts of each token, and it does not tell "
            "them; start it with --router_replay"
        )
    if status.maximum_top_k < expected.top_k:
        raise ProbeError(
            f"server {server}: config.objective.distill=student_topk needs the log-probs of config.distill.k="
            f"{expected.top_k} ids at a token, and it gives {status.maximum_top_k}"
        )


def _compare_numerics(server: str, status: pb.StatusReply) -> None:
    from scalerl_jax.model import row_blocks  # jax may not be loaded yet when the module is imported

    ours = row_blocks.fingerprint()
    if status.numerics in ("", "fast"):
        raise ProbeError(f"server {server}: config.numerics=bitwise: start it with --numerics=bitwise")
    if status.numerics != ours:
        raise ProbeError(
            f"server {server}: config.numerics=bitwise: its bits are of another machine or program "
            f"({peer_text.printable(status.numerics)}), the trainer's are of {ours}"
        )


def _short(fingerprint: str) -> str:
    return peer_text.printable(fingerprint[:12]) or "unknown"
