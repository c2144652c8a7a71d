"""What an episode costs by its number of turns: with its session, and with each turn prefilled whole.

    python -m tests.benchmarks.bench_turns [--turns=2,4,8,16,32] [--repeats=5]

The embedded generator, 10 M parameters in float32, EPISODES at a time: a turn ends with a stop token, one in 16 of all,
and is followed by a reply of REPLY tokens. Both sides have the same seeds. Without a session every turn feeds the whole
path again, so the prompts' tokens grow with the square of the turns. Printed: medians of seconds a turn, the tokens of
prompts that were fed, and the ratio of the seconds.
"""

import asyncio
import dataclasses
import statistics
import tempfile
import time

import numpy as np
from absl import app, flags

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.jax.engine import JaxEngine
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Sampling
from scalerl_jax.model import DecoderConfig
from tests.benchmarks.folders import write_folder

FLAGS = flags.FLAGS
flags.DEFINE_list("turns", ["2", "4", "8", "16", "32"], "of an episode")
flags.DEFINE_integer("repeats", 5, "timed runs of each side")

EPISODES, REPLY, PROMPT, LONGEST = 8, 24, 32, 96
CONFIG = DecoderConfig(
    vocab_size=256, hidden_size=320, layers=6, heads=8, kv_heads=4, head_dim=40, intermediate_size=1024,
    tied_embeddings=True,
)  # fmt: skip


async def episode(engine: JaxEngine, number: int, turns: int, *, session: str) -> int:
    """Tokens sampled."""
    rng, sampled = np.random.default_rng(number), 0
    prompt = rng.integers(0, CONFIG.vocab_size, PROMPT).astype(np.int32)
    for turn in range(turns):
        request = GroupRequest(
            0, f"{session}/{number}/{turn}", prompt, (CompletionRequest(0, 1000 * number + turn),),
            Sampling(answer_budget=LONGEST, stop_token_ids=tuple(range(16))), session=session and f"{session}/{number}",
        )  # fmt: skip
        (completion,) = [one async for one in engine.generate(request)]
        sampled += len(completion.token_ids)
        reply = rng.integers(0, CONFIG.vocab_size, REPLY).astype(np.int32)
        prompt = np.concatenate([prompt, completion.token_ids, reply])
    return sampled


@dataclasses.dataclass
class Side:
    seconds: list[float] = dataclasses.field(default_factory=list)  # a turn
    fed: int = 0  # tokens of prompts
    sampled: int = 0


async def play(engine: JaxEngine, turns: int, side: Side, *, session: str) -> None:
    before, began = engine.status().prefill_tokens, time.perf_counter()
    sampled = await asyncio.gather(*(episode(engine, i, turns, session=session) for i in range(EPISODES)))
    side.seconds.append((time.perf_counter() - began) / turns)
    side.fed, side.sampled = engine.status().prefill_tokens - before, sum(sampled)


async def compare(engine: JaxEngine, turns: int) -> None:
    kept, anew = Side(), Side()
    for repeat in range(FLAGS.repeats + 1):  # the first has the programs compiled
        for name, side in (("a", kept), ("", anew)):
            await play(engine, turns, side, session=name)
        if not repeat:
            kept.seconds.clear(), anew.seconds.clear()
    a, b = statistics.median(kept.seconds), statistics.median(anew.seconds)
    print(
        f"{turns:3d} turns: a turn of {EPISODES} episodes {a:6.3f} s, {kept.fed:6d} tokens of prompts fed, "
        f"{kept.sampled} sampled; whole prompts {b:6.3f} s, {anew.fed:6d} fed, {anew.sampled} sampled; "
        f"ratio {b / a:5.2f}",
        flush=True,
    )


async def main_async() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder, CONFIG)
        options = EngineOptions(
            folder, slots=EPISODES, queue=EPISODES, compute_dtype="float32", sync_dtype="float32", maximum_tokens=4096
        )
        engine = JaxEngine(options)
    for turns in map(int, FLAGS.turns):
        await compare(engine, turns)
    await engine.close()


def main(_) -> None:
    asyncio.run(main_async())


if __name__ == "__main__":
    app.run(main)
