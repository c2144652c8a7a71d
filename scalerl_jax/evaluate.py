"""scalerl-eval: evaluates policies on held-out prompts: mean@k, pass@k, majority@k and lengths.

    scalerl-eval --model=DIR --environment=math500 [--samples=16] [--servers=host:port,...] [--out=DIR]
    scalerl-eval --config=configs/quickstart.py --model=policy
    scalerl-eval --workdir=runs/quickstart [--steps=all|last|0,40,80]

The policy is a model folder, or each checkpoint of a run, whose rows make one curve. Prompts, sampling and scoring are
those of a run's own evaluations: the same config gives the same completions. Without --environment the held-out prompts
are the config's. Without --config the config is the run's, or the defaults; --config.a.b=v changes any field.
Every completion is saved as it arrives, and the same command continues after a kill.
"""

import collections
import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from launch.local import StartError
from launch.starting import SPARE, StartingServers
from scalerl_jax import config_check
from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.config_io import GivenConfig
from scalerl_jax.environments.base import Row, ScorerError
from scalerl_jax.environments.prompts import Replies
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.agents import agents_of
from scalerl_jax.model.decoder_config import DecoderConfig, check_folder, read_config
from scalerl_jax.model.hf import Tensors, to_hf
from scalerl_jax.model.tensor_layout import layout
from scalerl_jax.rollouts.evaluator import Evaluator
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers.discovery import Servers
from scalerl_jax.rollouts.servers.validate_status import FleetError, ProbeError
from scalerl_jax.run import continuing
from scalerl_jax.run.evaluation_folder import EvaluationFolder
from scalerl_jax.run.evaluation_request import asked
from scalerl_jax.run.inputs import check_length, digests, held_out_rows
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.run.pass_rates import evaluation_table
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.run.setup import expected_of, given_servers
from scalerl_jax.system import platforms, signals

FLAGS = flags.FLAGS
# Completions and their scores depend on these and on the prompts; the rest of the config may change on the way.
_SETTINGS = ("seed", "model.sync_dtype", "model.head_precision", "numerics", "fleet.engine", "fleet.compute_dtype")
_GROUPS = ("environment.", "mixture.", "rollout.", "evaluation.prompts", "evaluation.samples")


# ---- The prompts and settings ----------------------------------------------------------------------------------------


def first_of_each(rows: Sequence[Row], count: int) -> list[Row]:
    """The first `count` rows of each environment; 0: all."""
    seen = collections.Counter[str]()
    kept = []
    for row in rows:
        seen[row.environment] += 1
        if not count or seen[row.environment] <= count:
            kept.append(row)
    return kept


def settings(config: Config) -> dict[str, Any]:
    """The values of _SETTINGS and _GROUPS."""
    kept = {
        name: value
        for name, value in config_check.leaves(config).items()
        if name in _SETTINGS or (name.startswith(_GROUPS) and continuing.kind_of(name) != continuing.FREE)
    }
    return {**kept, "--prompts": FLAGS.prompts, "model.path": os.path.abspath(config.model.path)}


# ---- The policies ----------------------------------------------------------------------------------------------------


def steps_of(workdir: str, text: str) -> list[int]:
    """The checkpoints that --steps names, in order. Raises UserError if one does not exist."""
    from scalerl_jax.learner.checkpoint import steps_there  # Orbax, which a model folder does not need

    there = [0, *steps_there(os.path.join(workdir, "checkpoints"))]
    if text == "all":
        return there
    if text == "last":
        return there[-1:]
    try:
        steps = sorted({int(step) for step in text.split(",")})
    except ValueError:
        raise entry.UserError(f"--steps={text}: is not all, last, or steps with commas between") from None
    for step in steps:
        if step not in there:
            kept = ", ".join(map(str, there))
            raise entry.UserError(f"--steps={text}: the run keeps no checkpoint {step}; there are {kept}")
    return steps


def decoder_of(config: Config) -> DecoderConfig | None:
    """None for a family that only its engine knows."""
    try:
        return read_config(config.model.path)
    except ValueError:
        return None


def dtype_of(config: Config) -> np.dtype:
    import ml_dtypes

    return np.dtype(np.float32 if config.model.sync_dtype == "float32" else ml_dtypes.bfloat16)


def folder_weights(config: Config) -> dict[str, np.ndarray]:
    """The weights of a model folder, in the sync dtype: those of its family; for an unknown family all of them."""
    decoder = decoder_of(config)
    tensors = Tensors(config.model.path, decoder)
    return {name: tensors[name].astype(dtype_of(config)) for name in (tensors if decoder is None else layout(decoder))}


def key_of(config: Config, workdir: str, step: int, inputs: Mapping[str, str]) -> str:
    """A key that distinguishes one policy, with these inputs, from another in the same place."""
    found = hashlib.blake2b(repr(sorted(inputs.items())).encode(), digest_size=4)
    if step:
        with open(os.path.join(workdir, "checkpoints", str(step), "manifest", "metadata"), "rb") as record:
            found.update(record.read())  # has a digest of every tensor
    else:
        for path in (config.model.path, *([config.lora.adapter] if adapted(config, workdir) else [])):
            for name in sorted(os.listdir(path)):
                if name.endswith((".safetensors", ".json")):
                    about = os.stat(os.path.join(path, name))
                    found.update(f"{name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return found.hexdigest()


def adapted(config: Config, workdir: str) -> bool:
    """Whether the policy of step 0 is a run's, with the adapter that it started from."""
    return bool(workdir and config.lora.adapter)


def run_weights(config: Config, workdir: str, step: int) -> dict[str, np.ndarray]:
    """The weights of a run's policy at this step, in the sync dtype."""
    from scalerl_jax.learner.checkpoint import read_step
    from scalerl_jax.learner.make_trainer import policy_of, start_policy

    decoder = read_config(config.model.path)
    if step:
        params = policy_of(read_step(os.path.join(workdir, "checkpoints"), "params", step), config, decoder)
    else:
        params = start_policy(config, decoder)
    weights = to_hf(params, decoder, dtype_of(config))
    return {name: np.asarray(value) for name, value in weights.items()}


def compute_of(workdir: str) -> dict[int, dict[str, Any]]:
    """The cost of a run at each step: the columns of the ledger, for the curve's axis."""
    path = os.path.join(workdir, "metrics.jsonl")
    if not workdir or not os.path.exists(path):
        return {}
    found = {row["step"]: row.get("compute") or {} for row in read_rows(path)}
    first = next(iter(found.values()), {})
    return {0: dict.fromkeys(first, 0), **found}


# ---- The evaluation --------------------------------------------------------------------------------------------------


def main(given: GivenConfig) -> None:
    signals.be(signals.EXIT)
    signals.expect("interrupted: the same command goes on")

    # ---- 1. The prompts, and the policies to evaluate ----------------------------------------------------------------
    config = asked(given)
    for line in continuing.settle_dtypes(config, FLAGS.workdir):
        print(line, file=sys.stderr)
    workdir, name = FLAGS.workdir, os.path.basename(os.path.abspath(config.model.path))
    steps = steps_of(workdir, FLAGS.steps) if workdir else [0]
    with entry.user_mistakes():
        check_folder("--model" if FLAGS.model else "config.model.path", config.model.path)
        decoder = decoder_of(config)
        Tensors(config.model.path, decoder)
        tokenizer = Tokenizer(config.model.path)
        if decoder is not None:
            tokenizer.check_vocabulary(decoder.vocab_size)
        rows, remarks = held_out_rows(config, tokenizer, apart=bool(FLAGS.environment))
        rows = first_of_each(rows, FLAGS.prompts)
        compute, inputs = compute_of(workdir), digests(config, rows)
    for line in remarks:
        print(line, file=sys.stderr)

    # ---- 2. What is still missing ------------------------------------------------------------------------------------
    out = FLAGS.out or os.path.join(workdir, "evaluations", *([] if workdir else [name]))
    entry.check_out("--out", out)
    with contextlib.ExitStack() as stack:
        stack.enter_context(entry.user_mistakes(FleetError, ProbeError, ScorerError, StartError, ValueError))
        folder = stack.enter_context(EvaluationFolder(out, settings(config)))
        keys = {step: key_of(config, workdir, step, inputs) for step in steps}
        done = {row["step"]: row.get("key") for row in folder.rows()}
        left = [step for step in steps if done.get(step) != keys[step]]
        progress = stack.enter_context(ProgressLine("evaluate", updates=len(left) * len(rows)))
        evaluator: Evaluator | None = None
        for before, step in enumerate(left):
            with folder.completions(step, keys[step], rows, samples=config.evaluation.samples) as there:
                missing = [row for row in rows if row.index not in there.prompts]
                if missing:
                    of_run = step > 0 or adapted(config, workdir)
                    weights = run_weights(config, workdir, step) if of_run else folder_weights(config)
                    evaluator = evaluator or stack.enter_context(started(config, out, rows, tokenizer, progress))
                    for group in evaluator.evaluate(weights, missing):
                        there.add(group, tokenizer, rollout=config.rollout)
                        progress.update(step=before * len(rows) + len(there.prompts), note=there.so_far())
                folder.add_row({"step": step, "key": keys[step], **compute.get(step, {}), **there.row()})
        found = [row for row in folder.rows() if row["step"] in steps]

    # ---- 3. Results --------------------------------------------------------------------------------------------------
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # lines of a log are not wrapped
    console.print(evaluation_table(found, workdir or name))
    console.print(f"completions and numbers: {out}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def started(
    config: Config, out: str, rows: Sequence[Row], tokenizer: Tokenizer, progress: ProgressLine
) -> Iterator[Evaluator]:
    """Starts the given or local servers, the scorer, and the evaluator over them."""
    requests, decoder = Requests(config, tokenizer), decoder_of(config)
    given = given_servers(config, FLAGS.servers)
    maximum_tokens = config.rollout.max_prompt_tokens + requests.maximum_tokens
    if decoder is not None:
        check_length(config, maximum_tokens, decoder)
    expected = expected_of(config, decoder, maximum_tokens=maximum_tokens)
    expected = dataclasses.replace(expected, router_replay=False, top_k=0)  # the samples are not trained on
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(
            Scorer(
                config, decode=tokenizer.decode_completion, rows=rows, replies=Replies(config, tokenizer),
                turn_tokens=requests.turn_tokens,
            )
        )  # fmt: skip
        agents = stack.enter_context(agents_of(config, scorer, tokenizer, requests))
        addresses, local = given.addresses, None
        if not addresses:
            # This process computes nothing, so the servers may have all of the machine's GPUs.
            share = 1 - 2 * SPARE
            local = StartingServers(config, out, maximum_tokens=maximum_tokens, share=share)
            addresses = stack.enter_context(local).servers().addresses

        def wait(why: str) -> None:
            if local is not None:
                local.check()
            progress.update(waiting=why)

        servers = Servers(addresses, probe_prompts=rows, resolve=given.resolve, credentials=given.credentials)
        yield stack.enter_context(
            Evaluator(
                config,
                servers,
                expected=expected,
                requests=requests,
                score=scorer.score,
                wait=wait,
                episodes=scorer.episodes,
                agents=agents,
                take_over=local is not None or FLAGS.take,
            )
        )


def run() -> None:
    command_flags.evaluate()
    platforms.cpu_here()
    entry.run_with_config_later(main)


if __name__ == "__main__":
    run()
