"""Every way in which the faulty servers of these tests are faulty, and what must come of each.

sent away   nothing more is asked of this process, whatever it does
held back   what it said is not used; it is given up, or not asked for a while, and may come back, with longer pauses
            and in the end not at all
dropped     what it said is not used; it goes on working
left out    it never was in

Whatever comes of it, a line of the trainer's log names its address and the offence, in `words`.
"""

import dataclasses
import re
from collections.abc import Callable

import grpc

from tests.hostile import completion_lies, socket_lies, status_lies, stream_lies, weight_lies
from tests.hostile.lies import Lie
from tests.hostile.socket_lies import Listener
from tests.hostile.status_lies import number

SENT_AWAY, HELD_BACK, DROPPED, LEFT_OUT = "sent away", "held back", "dropped", "left out"
# Nothing to say of it: what it does wrong comes when nobody listens any more, or it was never reached.
UNHEARD = ""
NAN, INFINITY = float("nan"), float("inf")
STANDING = "train "  # how the progress line begins
CONTRACT = "breaks the contract"
POLICY = "log-probs (differ|are not)|importance ratio|sample size"  # of the log-probs that it tells
WEIGHTS_NOT_TAKEN = "weight update failed"
NOTHING_COMES = "samples? nothing|sampled nothing|does not finish"


def lines_about(log: str, address: str) -> list[str]:
    """What a trainer's log says of a server, apart from how the run stands."""
    return [line for line in log.splitlines() if address in line and not line.startswith(STANDING)]


@dataclasses.dataclass(frozen=True)
class Mode:
    lie: Callable[[], Lie] | None
    expected: str
    words: str  # a regular expression: what the line says of the offence
    listener: Listener | None = None

    def named_in(self, log: str, address: str) -> list[str]:
        """The lines that name the offender and the offence; not those that say how the run stands."""
        return [
            line
            for line in lines_about(log, address)
            if " joined: " not in line and re.search(self.words, line, re.IGNORECASE)
        ]


STATUS = {
    "busy seconds NaN": Mode(number("busy_seconds", NAN), HELD_BACK, "busy_seconds"),
    "up seconds NaN": Mode(number("up_seconds", NAN), HELD_BACK, "up_seconds"),
    "pause seconds infinite": Mode(number("pause_seconds", INFINITY), HELD_BACK, "pause_seconds"),
    "busy seconds negative": Mode(number("busy_seconds", -1.0), HELD_BACK, "busy_seconds"),
    "busy for ages": Mode(number("busy_seconds", 1e12), HELD_BACK, "busy_seconds"),
    "a billion devices": Mode(number("devices", 10**9), HELD_BACK, "devices"),
    "devices grow": Mode(number("devices", 3), HELD_BACK, "devices"),
    "sampled without end": Mode(number("sampled_tokens", 2**63), HELD_BACK, "sampled_tokens"),
    "forced without end": Mode(number("forced_tokens", 2**64 - 1), HELD_BACK, "forced_tokens"),
    "prefilled without end": Mode(number("prefill_tokens", 2**62), HELD_BACK, "prefill_tokens"),
    "counters fall": Mode(status_lies.counters_fall, HELD_BACK, "fell|falls|below|less|_tokens|busy_seconds"),
    "fast clock": Mode(status_lies.FastClock, HELD_BACK, "clock|faster|up_seconds|busy_seconds"),
    "another identity each time": Mode(status_lies.another_each_time, HELD_BACK, "restarted|another process"),
    "step of the future": Mode(status_lies.step_of_the_future, HELD_BACK, "version|step"),
    "newer trainer": Mode(status_lies.newer_trainer, HELD_BACK, "started later|newer|incarnation"),
    "no room": Mode(status_lies.no_room, HELD_BACK, "slots|no room"),
    "hoards": Mode(status_lies.Hoards, HELD_BACK, NOTHING_COMES),
    "silent status": Mode(status_lies.Silent, HELD_BACK, "no answer"),
    "status fails": Mode(status_lies.Fails, HELD_BACK, "no answer|UNKNOWN"),
    "status garbage": Mode(status_lies.Garbage, HELD_BACK, "cannot be decoded"),
    "status of 30 MiB": Mode(status_lies.huge, SENT_AWAY, "config|model|decoder"),
    "status forges lines": Mode(status_lies.forging, SENT_AWAY, "tokenizer"),
}

COMPLETIONS = {
    "log-probs lower": Mode(completion_lies.logprobs_lower, SENT_AWAY, POLICY),
    "log-probs higher": Mode(completion_lies.logprobs_higher, SENT_AWAY, POLICY),
    "log-probs of -30": Mode(completion_lies.logprobs_minus_30, SENT_AWAY, POLICY),
    "log-probs with noise": Mode(completion_lies.logprobs_noise, SENT_AWAY, POLICY),
    "log-probs constant": Mode(completion_lies.logprobs_constant, SENT_AWAY, POLICY),
    "random tokens": Mode(completion_lies.random_tokens, SENT_AWAY, f"{POLICY}|{CONTRACT}"),
    "log-probs NaN": Mode(completion_lies.logprobs_nan, SENT_AWAY, "not finite"),
    "log-probs positive": Mode(completion_lies.logprobs_positive, SENT_AWAY, "above 0"),
    "wrong incarnation": Mode(completion_lies.wrong_incarnation, SENT_AWAY, "of trainer 1"),
    "wrong group": Mode(completion_lies.wrong_group, SENT_AWAY, CONTRACT),
    "wrong index": Mode(completion_lies.wrong_index, SENT_AWAY, "not asked for"),
    "version of the future": Mode(completion_lies.version_of_the_future, SENT_AWAY, "version 1000000"),
    "version of the past": Mode(completion_lies.version_of_the_past, SENT_AWAY, "version -1"),
    "versions uncovered": Mode(completion_lies.versions_uncovered, SENT_AWAY, "version spans"),
    "wrong forced span": Mode(completion_lies.wrong_forced, SENT_AWAY, "forced tokens|forced|interrupted"),
    "forced backwards": Mode(completion_lies.forced_backwards, SENT_AWAY, "forced spans"),
    "empty": Mode(completion_lies.empty, SENT_AWAY, "no tokens"),
    "too long": Mode(completion_lies.too_long, SENT_AWAY, "5000 tokens"),
    "beyond vocabulary": Mode(completion_lies.beyond_vocabulary, SENT_AWAY, "vocabulary"),
    "negative tokens": Mode(completion_lies.negative_tokens, SENT_AWAY, "vocabulary"),
    "stops without stopping": Mode(completion_lies.stops_without_stopping, SENT_AWAY, "not one to stop at"),
    "no finish reason": Mode(completion_lies.no_reason, SENT_AWAY, "finish reason"),
    "odd bytes": Mode(completion_lies.odd_bytes, SENT_AWAY, CONTRACT),
    "40 MiB of log-probs": Mode(completion_lies.huge, SENT_AWAY, "log-prob"),
    "others' completions": Mode(stream_lies.OfOthers, SENT_AWAY, CONTRACT),
}

Code = grpc.StatusCode
STREAMS = {
    "always full": Mode(stream_lies.refuses(Code.RESOURCE_EXHAUSTED), HELD_BACK, "RESOURCE_EXHAUSTED|full|refus"),
    "wrong version always": Mode(
        stream_lies.refuses(Code.FAILED_PRECONDITION), HELD_BACK, "PRECONDITION|version|refus"
    ),
    "aborts calls": Mode(stream_lies.refuses(Code.ABORTED), HELD_BACK, "ABORTED"),
    "unavailable": Mode(stream_lies.refuses(Code.UNAVAILABLE), HELD_BACK, "UNAVAILABLE"),
    "invalid always": Mode(stream_lies.refuses(Code.INVALID_ARGUMENT), SENT_AWAY, "cannot serve this run|INVALID"),
    "unknown with many words": Mode(stream_lies.wordy, HELD_BACK, "UNKNOWN"),
    "aborted completions": Mode(stream_lies.Aborts, HELD_BACK, "unfinished"),
    "repeats for ever": Mode(stream_lies.Repeats, DROPPED, UNHEARD),
    "repeats the first": Mode(stream_lies.RepeatsTheFirst, HELD_BACK, "again and again"),
    "never ends": Mode(stream_lies.NeverEnds, DROPPED, UNHEARD),
    "swallows": Mode(stream_lies.swallows, HELD_BACK, NOTHING_COMES),
    "drips": Mode(stream_lies.drips, HELD_BACK, NOTHING_COMES),
    "ends at once": Mode(stream_lies.EndsAtOnce, SENT_AWAY, CONTRACT),
    "leaves one out": Mode(stream_lies.LeavesOneOut, SENT_AWAY, CONTRACT),
    "garbage": Mode(stream_lies.Garbage, SENT_AWAY, "cannot be decoded"),
}

WEIGHTS = {
    "refuses versions": Mode(weight_lies.refuses, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "full_sync for ever": Mode(weight_lies.full_sync, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "resend for ever": Mode(weight_lies.resend_for_ever, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "resend out of range": Mode(weight_lies.resend_out_of_range, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "an empty answer": Mode(weight_lies.says_nothing_at_all, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "another version": Mode(weight_lies.another_version, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "applied unread": Mode(weight_lies.unread, HELD_BACK, "no longer holds|version|weights"),
    "push never answered": Mode(weight_lies.NeverAnswers, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "push never read": Mode(weight_lies.NeverReads, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "push ended": Mode(weight_lies.Ends, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "push fails": Mode(weight_lies.Fails, HELD_BACK, WEIGHTS_NOT_TAKEN),
    "push garbage": Mode(weight_lies.Garbage, HELD_BACK, WEIGHTS_NOT_TAKEN),
}

SOCKETS = {
    "says nothing": Mode(None, LEFT_OUT, UNHEARD, socket_lies.says_nothing),
    "reads nothing": Mode(None, LEFT_OUT, UNHEARD, socket_lies.reads_nothing),
    "closes": Mode(None, LEFT_OUT, UNHEARD, socket_lies.closes),
    "closes after a request": Mode(None, LEFT_OUT, UNHEARD, socket_lies.closes_after_a_request),
    "bytes that mean nothing": Mode(None, LEFT_OUT, UNHEARD, socket_lies.garbage),
    "TLS alert": Mode(None, LEFT_OUT, UNHEARD, socket_lies.alerts),
}

RUNS = {
    "status": STATUS,
    "completions": COMPLETIONS,
    "streams and sockets": {**STREAMS, **SOCKETS},
    "weights": WEIGHTS,
}
MODES: dict[str, Mode] = {name: mode for modes in RUNS.values() for name, mode in modes.items()}
