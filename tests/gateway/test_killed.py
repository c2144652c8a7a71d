"""A gateway that is killed again and again while clients converse: nothing is lost, and nothing sampled twice. About
100 CPU seconds, the starts of the gateway."""

import asyncio
import contextlib
import pathlib
import random
from typing import Any

import httpx
import pytest

from scalerl_jax.gateway.chat import Chat
from tests.gateway.chat_model import QUESTION, array, gateway, generator, trace

pytestmark = [pytest.mark.slow, pytest.mark.long]

KILLS, CLIENTS = 50, 6


async def converse(address: str, name: str, answered: list[str], over: asyncio.Event) -> list[dict[str, Any]]:
    """The replies to a client that repeats each request until it has one, and appends its name for each of them."""
    messages, replies = [QUESTION], list[dict[str, Any]]()
    async with httpx.AsyncClient(base_url=f"http://{address}/s/{name}/v1", timeout=600) as client:
        while not over.is_set():
            body = {"model": "tiny", "messages": messages, "max_tokens": 12, "return_token_ids": True}
            headers, reply = {"idempotency-key": f"{name}-{len(replies)}"}, None
            while reply is None:
                with contextlib.suppress(httpx.TransportError):
                    reply = (await client.post("/chat/completions", json=body, headers=headers)).raise_for_status()
            replies.append(reply.json())
            answered.append(name)
            messages = [*messages, replies[-1]["choices"][0]["message"], {"role": "user", "content": "And?"}][-9:]
    return replies


def test_a_gateway_that_is_killed_fifty_times_loses_no_turn(
    chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    rng = random.Random(3)

    async def main(process: Any) -> dict[str, list[dict[str, Any]]]:
        answered, over = list[str](), asyncio.Event()
        names = [f"client-{number}" for number in range(CLIENTS)]
        clients = [asyncio.create_task(converse(process.address, name, answered, over)) for name in names]
        for _ in range(KILLS):
            due = len(answered) + rng.randint(1, 2 * CLIENTS)
            while len(answered) < due:
                await asyncio.sleep(rng.random() * 0.02)
            process.kill()
            await asyncio.to_thread(process.start)
            await asyncio.to_thread(process.wait)
        over.set()
        return dict(zip(names, await asyncio.gather(*clients), strict=True))

    with contextlib.closing(generator(tmp_path, model, "--replay_token_seconds=0.002").wait()) as server:
        flags = (f"--servers={server.address}", f"--journal={tmp_path / 'journal'}")
        with gateway(tmp_path, model, *flags) as process:
            for name, replies in asyncio.run(main(process)).items():
                turns = trace(process.address, name)["trace"]
                said = [reply["choices"][0]["token_ids"] for reply in replies]
                assert [array(turn["token_ids"]).tolist() for turn in turns] == said, name
