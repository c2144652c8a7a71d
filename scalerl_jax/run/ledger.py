"""The compute ledger: what a run has cost so far, in device-hours and in model FLOPs, killed processes included.

Every second of the trainer's devices is in exactly one class: busy (an update is computed), idle (it waits), evaluation
(it waits for one), set-up (before `begin`: loading, compiling, the probe; again after each restart) or stalled, which
does not count as compute:

    storage      the trainer's thread is inside `trainer("stalled")`: a checkpoint is saved
    no server    the trainer would be idle, and no server is admitted
    stopped      nothing called the ledger for over STOPPED_SECONDS: the process was stopped, whatever it did before

A generator's seconds come from the counters of its status replies, times its devices, in the same classes. `up` and
`busy` are their growth from one status to the next, `watched` is the part of that time that this trainer has seen, and
`stall` the part in which the trainer stalled. Busy time of the generator meanwhile stays busy:

    rest = max(0, min(up, watched) - busy)        stalled = min(rest, stall)        idle = rest - stalled

The cost of a run, `device_hours`, is the busy and idle time of both sides; the x axis of the fit is made of it and of
the steps (scaling/units.py). The row of the evaluation at step 0 is at 0 exactly (run/evaluations.py).

The time of teachers' servers (rollouts/teachers.py) during training has its own class, `teacher`, and is no part of
the cost: a teacher exists before the run, and its servers may serve several runs.

Model FLOPs are counted by formula. With N the weights of the matrix products (with the head, without the embedding
lookup; a tied table counts once; of the experts as many as a token has), L layers, H heads of size h, and c the
positions a token attends to:

    forward = 2 N + 4 L H h c   a token      (c: its position + 1; the sum over a segment of t tokens is t (t + 1) / 2;
                                             of Llama 4's local layers: its position in its chunk + 1)
    update  = 3 forward                      (what remat recomputes is the hardware's work, not the model's; with an
                                             adapter no weight has a gradient: 2 N less)

The trainer's segments are counted one by one. Generators report tokens without their positions, so their mean context
is that of the completions finished so far. Where a new mean makes that estimate smaller, the sum waits until the tokens
have caught up: no column ever falls.

All booked values are finite and not negative: statuses are validated before they reach the ledger
(rollouts/servers/validate_status.py), and a broken file is repaired from the run's rows (ledger_file.py).

Left out on purpose: norms, softmax and the optimizer (well under 1 %), the probe's scoring, and the stalls while rows
are written, a few milliseconds a step.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import layout
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.rollouts.loop_thread import CALL_SECONDS
from scalerl_jax.run import ledger_file
from scalerl_jax.system.files import write_whole

_log = logging.getLogger(__name__)

_SLACK_SECONDS = 1.0  # tolerance between two machines' clocks for when something began
_AWAY_SLACK_SECONDS = 60.0  # tolerance between two trainers' wall clocks
# The fleet's loop calls `serving` twice a second, also during an update. A call into the loop that it does not answer
# within CALL_SECONDS ends the run: if the loop made no call for longer than that, no thread ran.
STOPPED_SECONDS = CALL_SECONDS
_STALLS_REMEMBERED = 64  # the latest; if a status spans more of them, the older ones count as idle time
_SERVERS_REMEMBERED = 4096  # last counters are kept of this many server processes; an older one is treated as new


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What the FLOPs formula needs of a decoder."""

    matrix_parameters: int  # N above
    layers: int
    heads: int
    head_dim: int
    local: float = 0.0  # share of the layers in which a token attends inside its chunk alone
    chunk: int = 1  # positions of a chunk
    adapted: bool = False  # an adapter is trained

    @staticmethod
    def of(decoder: DecoderConfig, *, adapted: bool = False) -> "ModelShape":
        """From the rows of its family; the embedding lookup is not a product."""
        lookup = "" if decoder.tied_embeddings else "embed"
        tensors = (tensor for tensor in layout(decoder).values() if len(tensor.shape) > 1)
        products = 0
        for tensor in tensors:
            if tensor.row.leaf != lookup:
                named = zip(tensor.row.dimensions, tensor.shape)
                products += math.prod(decoder.experts_per_token if name == "experts" else n for name, n in named)
        shape = ModelShape(products, decoder.layers, decoder.heads, decoder.head_dim, adapted=adapted)
        if local := decoder.local_layers():
            shape = dataclasses.replace(shape, local=sum(local) / len(local), chunk=decoder.attention_chunk)
        return shape

    def context(self, length: float) -> float:
        """The sum of the positions that the tokens of a segment of `length` attend to, as the mean over layers."""
        whole = length * (length + 1) / 2
        if not self.local:
            return whole
        chunks, rest = divmod(length, self.chunk)
        inside = chunks * self.chunk * (self.chunk + 1) / 2 + rest * (rest + 1) / 2
        return (1 - self.local) * whole + self.local * inside

    def forward_flops(self, *, tokens: float, context: float) -> float:
        """FLOPs of a forward pass over `tokens` tokens that attend to `context` positions in total, as the mean over
        layers."""
        return 2.0 * self.matrix_parameters * tokens + 4.0 * self.layers * self.heads * self.head_dim * context

    def update_flops(self, lengths: Sequence[float], *, reference: bool = False) -> float:
        """FLOPs of a forward and backward pass over segments of these lengths, in tokens; reference: plus the forward
        pass of another policy."""
        tokens, context = (3.0 - self.adapted + reference) * sum(lengths), sum(map(self.context, lengths))
        return self.forward_flops(tokens=tokens, context=(3.0 + reference) * context)


class ServerCounters(NamedTuple):
    """Counters of one server process, since its start (StatusReply in rollout.proto)."""

    devices: int
    up_seconds: float
    busy_seconds: float
    sampled_tokens: int
    forced_tokens: int
    prefill_tokens: int

    @staticmethod
    def of(status: pb.StatusReply) -> "ServerCounters":
        return ServerCounters(*(getattr(status, name) for name in ServerCounters._fields))


class Ledger:
    """Books compute from the trainer's thread and the fleet's; saved in a JSON file that is at most `save_seconds` old.

    The clock is in monotonic seconds, `wall` in unix seconds. Saved values survive a restart of the trainer; the time
    between two trainers belongs to neither. A server process known from before is booked from its last counters on, but
    idle only while a trainer ran; an unknown one is booked from its start if it is younger than this trainer, else from
    its first status. A server that claims more time between two trainers than has passed is booked from its first
    status, too.

    reference: a reference policy also scores whatever is trained on.

    Raises ValueError (one line) if the file is broken and the rows beside it do not have the cost.
    """

    def __init__(
        self,
        path: str,
        *,
        trainer_devices: int,
        shape: ModelShape,
        reference: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        save_seconds: float = 1.0,
    ):
        self._path = path
        self._devices = trainer_devices
        self._shape, self._reference = shape, reference
        self._clock, self._wall = clock, wall
        self._save_seconds = save_seconds
        self._lock = threading.Lock()
        self._start = self._mark = self._saved = clock()
        self._kind = "idle"
        self._began = False
        self._serving: bool | None = None  # whether a server is admitted; None: no fleet calls us
        self._stalls: collections.deque[tuple[float, float]] = collections.deque(maxlen=_STALLS_REMEMBERED)
        self._last_status: dict[str, float] = {}  # server -> clock of its latest status in this process
        self._books = ledger_file.nothing_spent()
        if os.path.exists(path):
            self._load()

    @contextlib.contextmanager
    def trainer(self, kind: str) -> Iterator[None]:
        """While inside, the trainer's time is "busy", "evaluation" or "stalled"; outside it is idle. Nests."""
        assert kind in ("busy", "evaluation", "stalled", "idle"), kind
        with self._lock:
            self._advance()
            outer, self._kind = self._kind, kind
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._kind = outer
            self._save_if_due()

    def begin(self) -> None:
        """Training begins: from here on compute counts on the x axis."""
        with self._lock:
            self._advance()
            self._began = True

    def serving(self, serving: bool) -> None:
        """Reports whether a server is admitted: called at each change, and regularly from the first call on, see
        STOPPED_SECONDS."""
        with self._lock:
            self._advance()
            self._serving = serving
        self._save_if_due()

    def observe(
        self,
        server_id: str,
        counters: ServerCounters,
        *,
        evaluating: bool = False,
        from_here: bool = False,
        teacher: bool = False,
    ) -> None:
        """Books what a server did since its last status. evaluating: it did so for an evaluation; teacher: it is a
        teacher's server.

        from_here: what its counters claim of the time up to now may be wrong; it is booked from here on.

        No process is booked for more time than it was up. Call it at each heartbeat, and when a server enters or
        leaves an evaluation: an interval is in one class.
        """
        with self._lock:
            now = self._advance()
            servers, heard = self._books["servers"], self._books["heard"]
            before = servers.pop(server_id, None)
            if before is None:
                younger = counters.up_seconds <= now - self._start + _SLACK_SECONDS
                before = ServerCounters(counters.devices, 0.0, 0.0, 0, 0, 0) if younger else counters
            if from_here or not self._there_was_time(server_id, before, counters):
                before = counters
            # A step's busy seconds are reported when it ends: those beyond the up time count in the next interval.
            up = max(counters.up_seconds - before.up_seconds, 0.0)
            busy = min(max(counters.busy_seconds - before.busy_seconds, 0.0), up)
            servers[server_id] = counters._replace(busy_seconds=before.busy_seconds + busy)
            heard[server_id] = self._wall()
            while len(servers) > _SERVERS_REMEMBERED:
                oldest = next(iter(servers))
                for known in (servers, self._last_status, heard):
                    known.pop(oldest, None)
            last = self._last_status.get(server_id, self._start)
            self._last_status[server_id] = now

            idle = min(up - busy, max(now - last - busy, 0.0))
            since = max(last, now - up)
            stall = sum(max(0.0, end - max(start, since)) for start, end in self._stalls)
            stalled = min(idle, stall)
            idle -= stalled
            kind = "evaluation" if evaluating else "training" if self._began else "setup"
            seconds = self._books["seconds"]
            if teacher:
                seconds["teacher"] += (busy + idle) * counters.devices * self._began
                return
            seconds["generator_stalled"] += stalled * counters.devices
            if kind == "training":
                seconds["generator_busy"] += busy * counters.devices
                seconds["generator_idle"] += idle * counters.devices
            else:
                seconds[f"generator_{kind}"] += (busy + idle) * counters.devices
            sampled = max(counters.sampled_tokens - before.sampled_tokens, 0)
            self._books["sampled"][kind] += sampled
            self._books["decoded"][kind] += sampled + max(counters.forced_tokens - before.forced_tokens, 0)
            self._books["prefilled"][kind] += max(counters.prefill_tokens - before.prefill_tokens, 0)
        self._save_if_due()

    def observe_status(self, status: pb.StatusReply, evaluating: bool, from_here: bool) -> None:
        """As `observe`, from a status."""
        self.observe(status.server_id, ServerCounters.of(status), evaluating=evaluating, from_here=from_here)

    def observe_teacher(self, status: pb.StatusReply, from_here: bool) -> None:
        """As `observe_status`, for a teacher's server."""
        self.observe(status.server_id, ServerCounters.of(status), from_here=from_here, teacher=True)

    def finished_groups(self, groups: Sequence[FinishedGroup], *, evaluation: bool = False) -> None:
        """As `finished`, for each group."""
        for group in groups:
            branches = [branch for completion in group.completions for branch in completion.branches]
            of_row = [len(branch.token_ids) for branch in branches if branch.prompt is None]
            asked = [(len(group.row.token_ids), of_row)] if of_row else []
            asked += [(len(branch.prompt), [len(branch.token_ids)]) for branch in branches if branch.prompt is not None]
            for prompt, tokens in asked:
                self.finished(prompt_tokens=prompt, completion_tokens=tokens, evaluation=evaluation)

    def finished(self, *, prompt_tokens: int, completion_tokens: Sequence[int], evaluation: bool = False) -> None:
        """Records completions of one prompt: their lengths give the mean context of generated tokens."""
        with self._lock:
            sums = self._books["finished"]["evaluation" if evaluation else "training"]
            for length in completion_tokens:
                sums[0] += length
                sums[1] += self._shape.context(prompt_tokens + length) - self._shape.context(prompt_tokens)
            sums[2] += prompt_tokens
            sums[3] += self._shape.context(prompt_tokens)

    def trained(self, lengths: Sequence[int]) -> None:
        """Records an update over segments (prompt and completion) of these lengths, in tokens."""
        with self._lock:
            self._books["trainer"]["flops"] += self._shape.update_flops(lengths, reference=self._reference)
            self._books["trainer"]["tokens"] += sum(lengths)

    def snapshot(self) -> dict[str, float]:
        """The columns of a metrics or evaluation row, cumulative over all trainers of the run; saved as it is taken.

        device_hours                             trainer + generators, busy + idle: what the run costs
        {trainer,generator}_{busy,idle}_hours    its four parts
        {trainer,generator}_evaluation_hours     outside of it
        {trainer,generator}_setup_hours          outside of it
        {trainer,generator}_stalled_hours        outside of it
        teacher_hours                            outside of it
        model_flops                              trainer_flops + generator_flops: the fit's x
        evaluation_flops, setup_flops            outside of it
        trained_tokens                           prompt tokens included
        sampled_tokens, evaluation_tokens        sampled for training and for evaluation; forced ones not included
        """
        with self._lock:
            self._advance()
            row: dict[str, float] = {"device_hours": 0.0}
            for side in ("trainer", "generator"):
                for kind in ledger_file.CLASSES:
                    row[f"{side}_{kind}_hours"] = self._books["seconds"][f"{side}_{kind}"] / 3600
                row["device_hours"] += row[f"{side}_busy_hours"] + row[f"{side}_idle_hours"]
            row["teacher_hours"] = self._books["seconds"]["teacher"] / 3600
            flops = {kind: self._generator_flops(kind) for kind in ledger_file.TOKENS}
            trainer, sampled = self._books["trainer"], self._books["sampled"]
            row["model_flops"] = trainer["flops"] + flops["training"]
            row["trainer_flops"] = trainer["flops"]
            row["generator_flops"] = flops["training"]
            row["evaluation_flops"] = flops["evaluation"]
            row["setup_flops"] = flops["setup"]
            row["trained_tokens"] = trainer["tokens"]
            row["sampled_tokens"] = sampled["training"]
            row["evaluation_tokens"] = sampled["evaluation"]
        self.save()
        return row

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        with self._lock:
            self._advance()
            self._saved = self._clock()
            text = json.dumps(self._books, allow_nan=False)  # only finite values are booked; anything else is a bug
            write_whole(self._path, text, durable=False)  # each second; after a power loss the rows have the rest

    def _save_if_due(self) -> None:
        if self._clock() - self._saved >= self._save_seconds:
            self.save()

    def _load(self) -> None:
        repaired = ""
        try:
            saved = ledger_file.read(self._path)
        except ValueError as error:
            saved, repaired = ledger_file.recover(self._path, str(error))
        saved["servers"] = {name: ServerCounters(*values) for name, values in saved["servers"].items()}
        for part, mine in self._books.items():
            mine.update(saved.get(part, {}))
        if repaired:
            self.save()  # now: a run may be interrupted minutes before anything is booked
            _log.warning("%s", repaired)

    def _there_was_time(self, server_id: str, before: ServerCounters, counters: ServerCounters) -> bool:
        """Whether a process that an earlier trainer knew can have been up since then for as long as it claims."""
        heard = self._books["heard"].get(server_id)
        if server_id in self._last_status or heard is None:
            return True
        away = max(0.0, self._wall() - heard) + _AWAY_SLACK_SECONDS
        return counters.up_seconds - before.up_seconds <= away

    def _advance(self) -> float:
        """Books the trainer's time up to now; returns the clock."""
        now, start, kind = self._clock(), self._mark, self._kind
        self._mark = now
        if not self._began:
            kind = "evaluation" if kind == "evaluation" else "setup"
        elif self._serving is not None and (now - start > STOPPED_SECONDS or (kind == "idle" and not self._serving)):
            kind = "stalled"
        self._books["seconds"][f"trainer_{kind}"] += (now - start) * self._devices
        if kind == "stalled":
            if self._stalls and self._stalls[-1][1] == start:
                start, _ = self._stalls.pop()
            self._stalls.append((start, now))
        return now

    def _generator_flops(self, kind: str) -> float:
        finished = self._books["finished"]["evaluation" if kind == "evaluation" else "training"]
        tokens, context, prompt_tokens, prompt_context = finished
        decoded, prefilled = self._books["decoded"][kind], self._books["prefilled"][kind]
        attended = 0.0
        if tokens:
            attended += decoded * context / tokens
        if prompt_tokens:
            attended += prefilled * prompt_context / prompt_tokens
        flops = self._shape.forward_flops(tokens=decoded + prefilled, context=attended)
        flops += self._books["recovered"][kind]
        estimated = self._books["estimated"]
        estimated[kind] = max(estimated[kind], flops)
        return estimated[kind]
