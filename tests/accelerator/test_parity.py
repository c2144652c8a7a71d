"""One policy, two programs: what the engine samples has the log-probs that the trainer gives it."""

import asyncio

import jax
import numpy as np
import pytest

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.jax.engine import JaxEngine
from scalerl_jax.config import PHRASE
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Interruption, Sampling, Version
from scalerl_jax.environments.tokenizer import make_tokenizer
from scalerl_jax.model import Precision
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.rollouts import parity
from tests.accelerator.test_numerics import decoder_of, make_trainer
from tests.learner.segments import make_segments
from tests.support.trainers import scored, update

SLOTS = 16


async def sample(engine: JaxEngine, prompts: list[np.ndarray], tokens: int) -> list[tuple[np.ndarray, Completion]]:
    async def one(number: int, prompt: np.ndarray) -> list[tuple[np.ndarray, Completion]]:
        completions = tuple(CompletionRequest(i, 100 * number + i, tokens // 2) for i in range(4))
        request = GroupRequest(
            1, f"{number}", prompt, completions, Sampling(answer_budget=tokens // 2), Interruption((3, 4, 5), (5,))
        )
        return [(prompt, completion) async for completion in engine.generate(request)]

    return [pair for part in await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))) for pair in part]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_agree(device, sizes, dtype, tmp_path):
    """With the weights of the folder, and with those of an update that the engine is given while it serves."""
    decoder = decoder_of(sizes)
    maximum = sizes.pick(96, 256)
    trainer = make_trainer(device, decoder, Precision(dtype, dtype), seq_len=maximum)
    make_tokenizer(corpus=[PHRASE] * 9, path=str(tmp_path / "tokenizer"), vocabulary=decoder.vocab_size)
    write_model_folder(
        str(tmp_path / "model"),
        params=trainer.state["params"],
        decoder=decoder,
        tokenizer_dir=str(tmp_path / "tokenizer"),
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, decoder.vocab_size, n).astype(np.int32) for n in (3, 9, 24, 31)]
    mean, p99 = parity.LIMITS[dtype]

    async def main() -> None:
        options = EngineOptions(
            str(tmp_path / "model"),
            slots=SLOTS,
            queue=SLOTS,
            decode_chunk=8,
            compute_dtype=dtype,
            sync_dtype=dtype,
            maximum_tokens=maximum,
        )
        engine = JaxEngine(options)
        for step in range(2):
            tensors = trainer.version(step).tensors()
            await engine.load(Version(1, step), tensors, dict.fromkeys(tensors))
            samples = await sample(engine, prompts, maximum - 40)
            assert len(samples) == 4 * len(prompts)
            found = parity.mismatch(samples, scored(trainer, samples))
            print(
                f"{dtype}, version {step}: {found.mean:.1e} on average, {found.p99:.1e} at p99, {found.tokens} tokens"
            )
            assert found.tokens > 100
            assert found.mean <= mean and found.p99 <= p99
            update(trainer, make_segments([maximum, 40, 9], vocabulary=decoder.vocab_size, seed=step))
        await engine.close()

    asyncio.run(main())
    assert jax.devices()[0] == device
