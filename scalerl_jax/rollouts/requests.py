"""Builds the requests sent to servers: ids, seeds, budgets, sampling; and checks the completions that answer them.

    train/<group number>                   seed and budget from (run seed, group id, sample number)
    .../<sample number>/<turn>             turns after the first, and all turns of an agent: from the seed of the
                                           sample and the turn's number
    eval/<version>/<prompt index>          the same at every evaluation: from (run seed, prompt index, sample number)
    probe/<server>/<prompt index>

Everything is a hash of names, not a stream of random numbers: a completion requested again, from any server at any
time, is the same request.

`validate` checks a completion before it is used: it must answer the request, by a version that was allowed to sample
it. The codec has checked the message by itself: as many log-probs as tokens, finite, none above 0, spans that cover the
tokens. A failure means that the server breaks the contract; what it sent is never scored, stored or trained on.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Interruption, Sampling
from scalerl_jax.environments import Row, parts
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight, RolloutRequest
from scalerl_jax.rollouts.pacing import Pacing

EVALUATION = "eval/"  # prefix of the ids of evaluation groups
PROBE_SAMPLES = 4  # of one prompt
PROBE_TOKENS = 64  # thinking and answer of a probe: enough for p99, and seconds even on a slow server


class TextEncoder(Protocol):
    @property
    def stop_ids(self) -> Sequence[int]: ...

    def encode(self, text: str) -> list[int]: ...


def stable_hash(*parts: object) -> int:
    """64 bits that depend on `parts` alone: the same in every process, on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


class Requests:
    """Makes the requests of one run. Raises ValueError if the interruption phrase does not end thinking, or an episode
    has no room for a second turn."""

    def __init__(self, config: Config, tokenizer: TextEncoder):
        rollout = config.rollout
        self._seed, self._group_size, self._replay = config.seed, rollout.group_size, rollout.router_replay
        # On the wire a thinking budget of 0 means no separate one: the answer budget then covers both.
        high = rollout.thinking_budget_max if rollout.length_control == "interrupt" else 0
        self._thinking = (max(1, rollout.thinking_budget_min), high) if high else (0, 0)
        self._episode_tokens = rollout.max_episode_tokens if rollout.max_turns > 1 else 0
        self.agents = max(of_part.environment.agents for of_part in parts.configs(config).values())
        self.sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            answer_budget=rollout.answer_budget + rollout.thinking_budget_max - high,
            stop_token_ids=tuple(int(i) for i in tokenizer.stop_ids),
        )
        self.interruption = Interruption()
        if high:
            phrase, end = (
                tuple(tokenizer.encode(rollout.interruption_text)),
                tuple(tokenizer.encode(rollout.end_of_thinking)),
            )
            if not end or phrase[-len(end) :] != end:
                raise ValueError(
                    f"config.rollout.interruption_text={rollout.interruption_text!r}: its tokens do not end with those "
                    f"of config.rollout.end_of_thinking={rollout.end_of_thinking!r}"
                )
            self.interruption = Interruption(phrase, end)
        if 0 < self._episode_tokens <= self.turn_tokens:
            raise ValueError(
                f"config.rollout.max_episode_tokens={self._episode_tokens}: no second turn fits, since one may have "
                f"{self.turn_tokens} tokens (thinking and answer budgets, interruption phrase)"
            )

    @property
    def maximum_tokens(self) -> int:
        """Tokens of the longest possible completion, forced tokens included."""
        return self._episode_tokens or self.turn_tokens

    @property
    def turn_tokens(self) -> int:
        """Most tokens that one request can ask for: a completion, or a turn of an episode."""
        return self._thinking[1] + len(self.interruption.text_token_ids) + self.sampling.answer_budget

    def training_groups(self, pacing: Pacing, draw: Callable[[int], Row], *, trained: int) -> GroupBuffer:
        """The run's groups from batch `trained` on.

        draw: returns the row of group n. Its ValueError (no row is left) is raised by the batch that needs the group.
        """
        return GroupBuffer(
            pacing=pacing,
            open_group=lambda number: self.train(number, draw(number)),
            group_size=self._group_size,
            trained=trained,
            agents=self.agents,
        )

    def train(self, number: int, row: Row) -> GroupInFlight:
        """Group `number` of the run."""
        group_id = f"train/{number}"
        return GroupInFlight(number, group_id, row, self._completions(group_id, self._group_size))

    def evaluation(self, number: int, row: Row, *, version: int, samples: int) -> GroupInFlight:
        """The samples of one held-out prompt, the `number`-th of the evaluation of `version`."""
        named = self._completions(f"{EVALUATION}{row.index}", samples)
        return GroupInFlight(number, f"{EVALUATION}{version}/{row.index}", row, named)

    def of(self, rollout: RolloutRequest, *, incarnation: int) -> GroupRequest:
        """The request as the trainer of that incarnation sends it."""
        group = rollout.group
        group_id, prompt = group.group_id, group.row.token_ids
        completions = tuple(r for r in group.requests if r.index in rollout.left)
        if rollout.trajectory is not None:
            trajectory, turn = rollout.trajectory, rollout.trajectory.turns
            group_id, prompt = f"{group_id}/{trajectory.index}/{turn}", trajectory.next_prompt(prompt)
            completions = tuple(self.turn(wanted, turn) for wanted in completions)
        sampling, call = self.sampling, group.call
        if call is not None and call.most_tokens is not None:  # thinking has its own budget
            most = min(sampling.answer_budget, call.most_tokens)
            sampling = dataclasses.replace(sampling, answer_budget=most)
        return GroupRequest(
            incarnation=incarnation,
            group_id=group_id,
            prompt=prompt,
            completions=completions,
            sampling=sampling,
            interruption=self.interruption,
            minimum_step=rollout.minimum_step,
            pinned_step=rollout.pinned_step,
            router_replay=self._replay and not group.group_id.startswith(EVALUATION),  # not trained on
            session=call.session if call is not None else group.group_id if self._episode_tokens else "",
        )

    def probe(
        self, server: str, row: Row, *, incarnation: int, samples: int, version: int, pinned: bool = True
    ) -> GroupRequest:
        """Requests short completions at temperature 1; every second one has so small a thinking budget that it is
        interrupted.

        pinned: sampled by `version` alone; otherwise by it or a later one.
        """
        group_id = f"probe/{server}/{row.index}"
        high = min(self._thinking[1], PROBE_TOKENS)
        budgets = [high if i % 2 else min(high, 1 + i) for i in range(samples)]
        return GroupRequest(
            incarnation=incarnation,
            group_id=group_id,
            prompt=row.token_ids,
            completions=tuple(
                CompletionRequest(i, stable_hash("seed", self._seed, group_id, i), budgets[i]) for i in range(samples)
            ),
            sampling=Sampling(
                answer_budget=min(self.sampling.answer_budget, PROBE_TOKENS),
                stop_token_ids=self.sampling.stop_token_ids,
            ),
            interruption=self.interruption,
            minimum_step=version,
            pinned_step=version if pinned else None,
            router_replay=self._replay,
        )

    def _completions(self, name: str, samples: int) -> tuple[CompletionRequest, ...]:
        return tuple(self._completion(name, i) for i in range(samples))

    def _completion(self, name: str, index: int) -> CompletionRequest:
        low, high = self._thinking
        return CompletionRequest(
            index=index,
            seed=stable_hash("seed", self._seed, name, index),
            thinking_budget=low + stable_hash("thinking", self._seed, name, index) % (high - low + 1) if high else 0,
        )

    def turn(self, first: CompletionRequest, turn: int | str) -> CompletionRequest:
        """Request for turn `turn` (0: the first) of a completion requested as `first`; an agent's turns have names."""
        return self._completion(f"turn/{first.seed}/{turn}", first.index)


def spread_probes(prompts: Sequence[Row], completions: int) -> tuple[tuple[Row, int], ...]:
    """Distributes `completions` samples over some of the prompts: ((row, samples), ...)."""
    assert len(prompts) > 0 and completions > 0
    # A few samples of one prompt: their shared prefill is part of what is compared.
    used = list(prompts[: -(-completions // PROBE_SAMPLES)])
    counts = [completions // len(used) + (i < completions % len(used)) for i in range(len(used))]
    return tuple(zip(used, counts))


# ---- the answers -----------------------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """How a mixture of experts routes a token."""

    layers: int
    experts_per_token: int
    experts: int


def validate(
    completion: Completion, request: GroupRequest, *, newest: int, vocabulary: int, routed: Routed | None = None
) -> None:
    """Raises ValueError naming the completion and what is wrong with it.

    newest: the latest version that any server can hold. vocabulary: token ids are below it; 0: not known.
    routed: of the policy; None: it has no experts.
    """
    name = f"completion {completion.group_id!r}/{completion.index}"
    if completion.incarnation != request.incarnation or completion.group_id != request.group_id:
        raise ValueError(f"{name} of trainer {completion.incarnation} came for {request.group_id!r}")
    asked = {wanted.index: wanted for wanted in request.completions}.get(completion.index)
    if asked is None:
        raise ValueError(f"{name} was not asked for")

    for what, seconds in (("waiting", completion.queued_seconds), ("sampling", completion.sampling_seconds)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} says that its {what} took {seconds} s")

    steps = [step for step, _, _ in completion.versions]
    if min(steps) < request.minimum_step:
        raise ValueError(f"{name} was sampled by version {min(steps)}, older than {request.minimum_step}")
    if max(steps) > newest:
        raise ValueError(f"{name} was sampled by version {max(steps)}, and the newest there is is {newest}")
    if request.pinned_step is not None and set(steps) != {request.pinned_step}:
        raise ValueError(f"{name} was sampled by versions {steps}, pinned to {request.pinned_step}")

    tokens, phrase = completion.token_ids, np.array(request.interruption.text_token_ids, np.int32)
    if tokens.min() < 0 or (vocabulary and tokens.max() >= vocabulary):
        raise ValueError(f"{name} has tokens from {tokens.min()} to {tokens.max()}, of a vocabulary of {vocabulary}")
    most = request.most_tokens(asked)
    if len(tokens) > most:
        raise ValueError(f"{name} has {len(tokens)} tokens, its budgets and the phrase make {most}")
    if len(completion.forced) > 1:
        raise ValueError(f"{name} was interrupted {len(completion.forced)} times")
    for start, end in completion.forced:
        # The end of the cache may have truncated it.
        if not np.array_equal(tokens[start:end], phrase[: end - start]):
            raise ValueError(f"{name} has forced tokens that are not the interruption phrase")
    stops = request.sampling.stop_token_ids
    if completion.finish_reason == "stop" and stops and int(tokens[-1]) not in stops:
        raise ValueError(f"{name} has stopped, and its last token {tokens[-1]} is not one to stop at")
    if request.router_replay and routed is not None:
        _check_experts(name, completion.experts, len(request.prompt) + len(tokens) - 1, routed)


def _check_experts(name: str, experts: np.ndarray | None, fed: int, routed: Routed) -> None:
    if experts is None:
        raise ValueError(f"{name} does not tell its experts")
    wanted = (fed, routed.layers, routed.experts_per_token)
    if experts.shape != wanted:
        raise ValueError(f"{name} tells experts {list(experts.shape)}, and not {list(wanted)}")
    if experts.max() >= routed.experts:
        raise ValueError(f"{name} has expert {experts.max()}, of {routed.experts}")
    for one, other in itertools.combinations(range(routed.experts_per_token), 2):
        if (experts[..., one] == experts[..., other]).any():
            raise ValueError(f"{name} sends a token to one expert twice")
