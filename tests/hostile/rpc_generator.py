"""Calls that no honest client makes, as a function of a seed and a number: call(7) is the same whatever came before.

random bytes, messages with spoilt fields, messages damaged on their way, broken streams of weights, good requests that
are cancelled or never read, messages near the limit of size, and methods that do not exist; of the service itself, of
health and of reflection.
"""

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import SERVICE
from tests.hostile.mutations import damage, spoil
from tests.hostile.weight_streams import WeightStreams

HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = ("Status", "Generate", "PushWeights", "Score", "ScoreMany")

LARGE_AMONG = 100  # of the first calls a few are large

SEQUENCE = codec.ScoreRequest(np.arange(3, 40), 2, 3, np.arange(-1, 34)[:, None])

# How the client behaves once it has sent what it has to send.
READ = "read"  # to the end
FIRST = "first"  # reads one message and goes away
CANCEL = "cancel"  # goes away at once
UNREAD = "unread"  # waits a moment, reads nothing, goes away


@dataclasses.dataclass(frozen=True)
class Call:
    number: int
    path: str  # of the method
    messages: tuple[bytes, ...]
    then: str
    what: str

    def __str__(self) -> str:
        head = self.messages[0][:80].hex() if self.messages else "nothing"
        size = sum(map(len, self.messages))
        return (
            f"call {self.number}: {self.path}, {self.what}, then {self.then}; {len(self.messages)} messages of {size} "
            f"bytes, the first begins {head}"
        )


class Generator:
    """Calls for a server that holds `version` of a model with these tensors."""

    def __init__(self, seed: int, *, tensors: Mapping[str, tuple[int, ...]], version: codec.Version):
        self.seed, self.streams = seed, WeightStreams(tensors, version)
        self._valid = {
            "Status": pb.StatusRequest(),
            "Generate": codec.request_to_proto(group(version, "train/0")),
            **dict.fromkeys(("Score", "ScoreMany"), codec.score_request_to_proto(SEQUENCE)),
            "PushWeights": pb.WeightMessage(commit=True),
        }

    def call(self, number: int) -> Call:
        rng = random.Random(f"{self.seed}/{number}")
        kind = rng.choices(
            ("random bytes", "spoilt", "damaged", "weights", "left alone", "large", "health", "no such method"),
            # Large ones come first: what they leave in the allocator is there before memory is followed.
            (10, 34, 16, 22, 8, 8 if number < LARGE_AMONG else 0, 8, 2),
        )[0]
        path, messages, then, what = getattr(self, "_" + kind.replace(" ", "_"))(rng)
        return Call(number, path, tuple(messages), then, f"{kind}: {what}")

    def _random_bytes(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        size = rng.choice((0, 1, 2, 10, 100, 5_000))
        return f"/{SERVICE}/{rng.choice(METHODS)}", [rng.randbytes(size)], READ, f"{size} bytes"

    def _spoilt(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        method = rng.choice(("Generate", "Generate", "Generate", "Score", "ScoreMany"))
        message, what = spoil(self._valid[method], rng)
        then = rng.choice((READ, READ, READ, READ, FIRST, CANCEL, UNREAD))
        return f"/{SERVICE}/{method}", [message.SerializeToString()], then, what

    def _damaged(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        method = rng.choice(METHODS)
        data, what = damage(self._valid[method].SerializeToString(), rng)
        return f"/{SERVICE}/{method}", [data], READ, what

    def _weights(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        stream = self.streams.broken(rng)
        then = rng.choice((READ, READ, READ, FIRST, CANCEL, UNREAD))
        return f"/{SERVICE}/PushWeights", list(stream.messages), then, stream.what

    def _left_alone(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        method = rng.choice(("Generate", "Generate", "Score", "ScoreMany", "Status"))
        then = rng.choice((FIRST, CANCEL, UNREAD))
        return f"/{SERVICE}/{method}", [self._valid[method].SerializeToString()], then, "a good request"

    def _large(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        """One of those whose cost is linear in what the client says: near the limit of one message, or over it."""
        what = rng.choice(("completions", "prompt", "score", "text", "over the limit"))
        generate = pb.GenerateRequest()
        generate.CopyFrom(self._valid["Generate"])
        if what == "completions":  # 24.7 MiB
            one = pb.GenerateRequest(completions=[pb.CompletionRequest(index=1)]).SerializeToString()
            return f"/{SERVICE}/Generate", [generate.SerializeToString() + one * 4_000_000], READ, what
        if what == "score":
            return f"/{SERVICE}/Score", [pb.ScoreRequest(token_ids=bytes(60 * 2**20)).SerializeToString()], READ, what
        if what == "text":
            generate.group_id = "\n" * (30 * 2**20)
        else:
            generate.prompt_token_ids = bytes((60 if what == "prompt" else 65) * 2**20)
        return f"/{SERVICE}/Generate", [generate.SerializeToString()], READ, what

    def _health(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        if rng.random() < 0.5:
            valid = health_pb2.HealthCheckRequest(service=rng.choice(("", SERVICE, "nobody")))
            # Watch goes on for ever.
            path, then = rng.choice(
                ((f"{HEALTH}/Check", READ), (f"{HEALTH}/Watch", FIRST), (f"{HEALTH}/Watch", CANCEL))
            )
        else:
            valid = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
            path, then = REFLECTION, rng.choice((READ, CANCEL))
        act = rng.choice((spoil, damage))
        if act is spoil:
            message, what = spoil(valid, rng)
            return path, [message.SerializeToString()], then, what
        data, what = damage(valid.SerializeToString(), rng)
        return path, [data], then, what

    def _no_such_method(self, rng: random.Random) -> tuple[str, list[bytes], str, str]:
        path = rng.choice((f"/{SERVICE}/Nothing", "/a/b", f"/{SERVICE}/status", "/scalerl.v2.Rollout/Status"))
        return path, [rng.randbytes(10)], READ, path


def group(version: codec.Version, name: str) -> codec.GroupRequest:
    """A good request, always the same."""
    return codec.GroupRequest(
        incarnation=version.incarnation,
        group_id=name,
        prompt=np.array([7, 8, 9], np.int32),
        completions=tuple(codec.CompletionRequest(n, seed=1000 + n, thinking_budget=10 + n) for n in range(4)),
        sampling=codec.Sampling(temperature=1.0, top_p=1.0, top_k=0, answer_budget=20, stop_token_ids=(1,)),
        interruption=codec.Interruption((20, 21, 22), (22,)),
        minimum_step=version.step,
    )
