"""What is compared when trainer and server meet: are both sides going to run the same policy?

    before any weight is sent   tokenizer fingerprint, the decoder's shape, dtype of the logits, precision of the head's
                                operands (a server that does not tell is left to the comparison below), dtype of the
                                weights
    with the weights held       the server samples, the trainer scores:  d_t = |logp_trainer(t) - logp_server(t)| over
                                sampled tokens;  mean d and the 99th percentile of d must be under their limits

A server that fails is turned away with one line, and the run goes on with the others; where there are none, that line
ends it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from scalerl_jax.config import ParityConfig
from scalerl_jax.contract import peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion
from scalerl_jax.rollouts.errors import ProbeError
from scalerl_jax.rollouts.fleet import Fleet

# Seen between XLA programs of different shape with the same weights: 1e-6 in float32; in bfloat16 about 1e-2 mean, and
# 1e-3 where only the logits are rounded to it: each of the two sides' may fall to another neighbour.
# With experts a router that is undecided takes another on the other side: 2e-2 mean and 2e-1 at the 99th percentile
# were measured there, on small models with random weights, and three times that is allowed.
LIMITS = {"float32": (1e-3, 1e-2), "bfloat16": (2e-2, 2e-1)}  # mean, 99th percentile
LIMITS_WITH_EXPERTS = {**LIMITS, "bfloat16": (6e-2, 6e-1)}

FEWEST_TOKENS = 16  # of a server that is probed again, of completions by the version that the trainer holds

# The prompts' ids [tokens] int32 and a completion each -> the trainer's log-probs of the completion's tokens [tokens].
Score = Callable[[Sequence[tuple[np.ndarray, Completion]]], Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the trainer has; a server must have the same."""

    tokenizer_fingerprint: str
    model_config: str  # canonical JSON
    sync_dtype: str
    head_precision: str = "default"  # default | highest | bfloat16: the logits are rounded to it
    maximum_tokens: int = 0  # longest prompt and completion together; the server must hold at least this much
    router_replay: bool = False  # the server must be able to tell the experts of its completions
    experts: bool = False  # the decoder has some: two sides in bfloat16 may choose others


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """|log-prob difference| over sampled tokens, nats."""

    mean: float
    p99: float
    tokens: int


def compare(server: str, status: pb.StatusReply, expected: Expected) -> None:
    """Raises ProbeError naming the first thing that differs."""
    if status.tokenizer_fingerprint != expected.tokenizer_fingerprint:
        raise ProbeError(
            f"server {server}: its tokenizer ({_short(status.tokenizer_fingerprint)}) is not the trainer's "
            f"({_short(expected.tokenizer_fingerprint)}); serve the folder that the trainer starts from"
        )
    for what, theirs, ours, flag in (
        ("model config", status.model_config, expected.model_config, ""),
        # A server written before there was such a field tells nothing.
        ("head precision", status.head_precision or expected.head_precision, expected.head_precision, "head_precision"),
        ("head dtype", status.head_dtype, "bfloat16" if expected.head_precision == "bfloat16" else "float32", ""),
        ("wire dtype", status.sync_dtype, expected.sync_dtype, "sync_dtype"),
    ):
        if theirs != ours:
            hint = f"; start it with --{flag}={ours}" if flag else ""
            raise ProbeError(
                f"server {server}: its {what} is {peer_text.said(theirs) or 'unknown'}, the trainer's is {ours}{hint}"
            )
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


def mismatch(
    samples: Sequence[tuple[np.ndarray, Completion]], logprobs: Sequence[np.ndarray], *, step: int | None = None
) -> Mismatch:
    """Compares the servers' log-probs with the trainer's, each [tokens] float32; forced tokens are left out.

    step: only completions that this version sampled whole; None: all. Of one during which the weights were swapped the
    later tokens are drawn with keys and values of the earlier weights, as they may be: no limit here is for that.
    """
    assert len(samples) == len(logprobs) > 0
    parts = []
    for (_, completion), ours in zip(samples, logprobs):
        assert len(ours) == len(completion.token_ids)
        if step is None or {by for by, *_ in completion.versions} == {step}:
            difference = np.abs(np.asarray(ours, np.float64) - completion.logprobs)
            parts.append(difference[completion.sampled()])
    differences = np.concatenate([np.zeros(0), *parts])
    if not len(differences) or not np.isfinite(differences).all():
        return Mismatch(float("inf"), float("inf"), len(differences))
    return Mismatch(float(differences.mean()), float(np.quantile(differences, 0.99)), len(differences))


class Probe:
    """Both halves of the meeting. `check` runs on the fleet's thread, `admit_candidates` on the trainer's."""

    def __init__(self, config: ParityConfig, *, expected: Expected, score: Score, dtype: str):
        """dtype: the coarser compute dtype of the two sides. It sets the limits that config leaves at 0, unless logits
        are rounded to a coarser one."""
        limits = LIMITS_WITH_EXPERTS if expected.experts else LIMITS
        mean, p99 = limits["bfloat16" if expected.head_precision == "bfloat16" else dtype]
        self.limits = (config.mean_limit or mean, config.p99_limit or p99)
        self.score = score
        self._expected = expected

    def check(self, server: str, status: pb.StatusReply) -> None:
        """Raises ProbeError where the server is not one for this run, before it is sent anything."""
        compare(server, status, self._expected)

    def admit_candidates(self, fleet: Fleet) -> list[tuple[str, Mismatch]]:
        """Scores what candidates sampled with the version the trainer holds now; admits or turns away each.

        Returns the servers admitted. Where one fails before any was admitted, and no other is left, the fleet's next
        call raises ProbeError.
        """
        admitted = []
        for candidate in fleet.candidates.due():
            samples = [(prompt.token_ids, completion) for prompt, completion in candidate.samples]
            found = mismatch(samples, self.score(samples))
            server, what = candidate.process.address, self._too_far(found)
            if what:
                fleet.candidates.reject(server, f"server {server}: {what}")
            else:
                admitted.append((server, found))
                fleet.candidates.admit(server)
        return admitted

    def compare_again(
        self, samples: Sequence[tuple[np.ndarray, Completion]], logprobs: Sequence[np.ndarray], *, version: int
    ) -> str | None:
        """What is wrong with what a server has sampled that was admitted before; "": nothing.

        logprobs: by the policy `version`. None: it has sampled too little with that one alone.
        """
        found = mismatch(samples, logprobs, step=version)
        return None if found.tokens < FEWEST_TOKENS else self._too_far(found)

    def _too_far(self, found: Mismatch) -> str:
        mean, p99 = self.limits
        if found.mean <= mean and found.p99 <= p99:
            return ""
        return (
            f"its log-probs differ from the trainer's by {found.mean:.2g} on average and {found.p99:.2g} at the 99th "
            f"percentile of {found.tokens} tokens (limits {mean:g} and {p99:g}): "
            "the two sides do not run the same policy"
        )


def _short(fingerprint: str) -> str:
    return peer_text.said(fingerprint[:12]) or "unknown"
