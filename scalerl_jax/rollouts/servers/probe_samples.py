"""What a candidate samples for the probe: the probe's prompts, in waves that a server of few slots has room for."""

import asyncio
import dataclasses
import itertools
import operator
from collections.abc import Collection, Sequence
from typing import NamedTuple

from scalerl_jax.contract import codec
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.servers.context import ClientContext

Sample = tuple[Row, codec.Completion]


class Probed(NamedTuple):
    """What a server has sampled for the probe."""

    process: Process
    samples: tuple[Sample, ...]


async def sample(
    stub: Stub, context: ClientContext, requests: Sequence[tuple[Row, codec.GroupRequest]], *, room: int, seconds: float
) -> list[Sample]:
    """The completions of each (row, request).

    room: completions the server takes at once. seconds: deadline of each call. Raises grpc.RpcError where a call fails,
    ValueError where an answer breaks the contract.
    """
    samples: list[Sample] = []
    for wave in _waves(requests, max(1, room)):
        asked = [asyncio.ensure_future(_ask(stub, context, *pair, seconds=seconds)) for pair in wave]
        try:
            for part in await asyncio.gather(*asked):
                samples += part
        finally:
            # Where one fails, the others are not left to go on behind our back.
            for call in asked:
                call.cancel()
    return samples


async def _ask(
    stub: Stub, context: ClientContext, row: Row, request: codec.GroupRequest, *, seconds: float
) -> list[Sample]:
    got, repeated = dict[int, Sample](), 0
    call = stub.Generate(codec.request_to_proto(request), timeout=seconds)
    try:
        async for message in call:
            completion = context.received(message, request)
            repeated += completion.index in got
            if repeated > len(request.completions):
                raise ValueError(f"completion {completion.group_id!r}/{completion.index} came again and again")
            got[completion.index] = (row, completion)
            if len(got) == len(request.completions):
                break
    finally:
        call.cancel()
    check_whole(request, got)
    return list(got.values())


def check_whole(request: codec.GroupRequest, told: Collection[int]) -> None:
    """Raises ValueError where a stream that ended well has left out completions; told: the indices that came."""
    missing = len(request.completions) - len(told)
    if missing:
        raise ValueError(f"its answer to {request.group_id!r} ended without {missing} of the completions asked for")


def _waves(requests: Sequence[tuple[Row, codec.GroupRequest]], room: int) -> list[list[tuple[Row, codec.GroupRequest]]]:
    """The same completions in waves of at most `room`; in a wave those of one row are one request."""
    wanted = [(number, one) for number, (_, request) in enumerate(requests) for one in request.completions]
    waves = []
    for start in range(0, len(wanted), room):
        wave: list[tuple[Row, codec.GroupRequest]] = []
        for number, part in itertools.groupby(wanted[start : start + room], key=operator.itemgetter(0)):
            row, request = requests[number]
            wave.append((row, dataclasses.replace(request, completions=tuple(one for _, one in part))))
        waves.append(wave)
    return waves
