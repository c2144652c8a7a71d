"""scalerl-sft: the supervised warm start, from JSONL traces or from the built-in task's.

    scalerl-sft --config=configs/quickstart.py --workdir=runs/quickstart-warm-start [--config.a.b=v]

    loss = - (1 / loss tokens of the update) * sum of log p over the completions' tokens

Trains a new decoder (config.sft.model_file, or the sizes in config.sft) with a tokenizer made from its traces, or the
policy in config.sft.model_path, and writes WORKDIR/model: a Hugging Face folder, whole or not at all. Everything random
is a function of (seed, update), so a run killed and started again goes on and ends with the model it would have made.
The workdir remembers only the fields that the warm start depends on: others may change, and the model stays. Where one
of them is changed on purpose (--allow), it goes on from the newest checkpoint and replaces the model at the end.

Left out on purpose: an evaluation; scalerl-train makes one at step 0.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence

import jax
import numpy as np
import optax
from absl import flags

from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config, OptimizerConfig
from scalerl_jax.config_names import ConfigError
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.learner import optimizer
from scalerl_jax.learner.checkpoint import Checkpoints, newest_step
from scalerl_jax.learner.step import Learner, make_learner
from scalerl_jax.model.decoder import Params, init_params
from scalerl_jax.model.decoder_config import SIZES, DecoderConfig, read_config
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.objective.losses import cross_entropy
from scalerl_jax.run import continuing
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.leaving import told_where_it_goes_on
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.system import files, signals
from scalerl_jax.traces import ArithmeticTraces, FileTraces, corpus, segments

# The gradient is clipped: the first updates of a new decoder are steep.
_ADAMW = OptimizerConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, max_grad_norm=1.0)
_FINAL_RATE = 0.1  # of the peak, at the end of the cosine
_OUTDATED = "model.outdated"  # beside a model that a changed config is making again
_INITIAL = 4  # a stream of random numbers, beside those of traces.py and environments/arithmetic.py


# ---- The decoder and its tokenizer ---------------------------------------------------------------------------------


def settle_tokenizer(config: Config, folder: RunFolder) -> str:
    """The folder of the tokenizer: the start model's, or one made here (whole or not at all)."""
    if config.sft.model_path:
        return config.sft.model_path
    out = folder.path("tokenizer")
    if not os.path.isdir(out):
        with files.whole_folder(out) as folder_there:
            make_tokenizer(corpus=corpus(config), path=folder_there, vocabulary=config.sft.vocab_size)
    return out


def decoder_config(config: Config, tokenizer: Tokenizer) -> DecoderConfig:
    """The decoder to train. Raises ValueError naming the field or file at fault."""
    sft = config.sft
    if sft.model_path:
        return read_config(sft.model_path)
    if sft.model_file:
        try:
            with open(sft.model_file) as file:
                decoder = DecoderConfig.from_hf(json.load(file))
        except OSError as error:
            raise ValueError(f"config.sft.model_file={sft.model_file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"config.sft.model_file={sft.model_file}: {error}") from error
    else:
        sizes = {name: getattr(sft, name) for name in SIZES}
        # At these sizes a head of its own would be a third of the parameters.
        decoder = DecoderConfig(**sizes, tied_embeddings=True)
    if decoder.vocab_size < tokenizer.vocabulary:
        raise ValueError(f"the decoder has {decoder.vocab_size} tokens, the tokenizer {tokenizer.vocabulary}")
    return dataclasses.replace(decoder, stop_token_ids=tokenizer.stop_ids)


def learner_of(config: Config, decoder: DecoderConfig, *, longest: int) -> Learner:
    """`longest`: tokens of the longest example."""
    sft = config.sft
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        sft.learning_rate,
        sft.warmup_steps,
        max(sft.max_steps, sft.warmup_steps + 1),
        sft.learning_rate * _FINAL_RATE,
    )
    return make_learner(
        config,
        decoder,
        max_segment=min(longest, sft.seq_len),
        seq_len=sft.seq_len,
        rows_per_step=sft.rows_per_step,
        optimizer=optimizer.from_config(dataclasses.replace(_ADAMW, weight_decay=sft.weight_decay), schedule),
        loss=cross_entropy,
    )


def initial_params(config: Config, decoder: DecoderConfig, learner: Learner) -> Params:
    if config.sft.model_path:
        return load_hf(config.sft.model_path, learner.mesh)[1]
    seed = int(np.random.default_rng([config.seed, _INITIAL]).integers(2**31))
    return init_params(decoder, jax.random.key(seed), learner.mesh)


def relevant(config: Config) -> Config:
    """The fields that the warm start depends on; the rest at their defaults, so that it may change between runs."""
    kept = Config(seed=config.seed, sft=config.sft, telemetry=config.telemetry)
    if not config.sft.traces_file:
        for name in ("minimum_terms", "maximum_terms"):
            setattr(kept.environment, name, getattr(config.environment, name))
    kept.rollout.interruption_text = config.rollout.interruption_text
    kept.rollout.thinking_budget_max = int(config.rollout.thinking_budget_max > 0)
    kept.rollout.thinking_budget_min = 0
    for name in ("compute_dtype", "sync_dtype", "head_precision"):
        setattr(kept.model, name, getattr(config.model, name))
    return kept


# ---- The run -------------------------------------------------------------------------------------------------------


def outdated(folder: RunFolder) -> bool:
    """Whether the model there is of another config than the one asked for now, so that it has to be made again."""
    changed = any(change.kind != continuing.FREE for change in folder.changes)
    return changed or os.path.exists(folder.path(_OUTDATED))


def main(config: Config, workdir: str, *, allow: Sequence[str] = ()) -> None:
    signals.be(signals.EXIT)
    signals.expect("interrupted before the first update: the same command begins again")
    with told_where_it_goes_on(workdir), contextlib.ExitStack() as stack:
        # ---- 1. The run folder; nothing to do where the model is there ---------------------------------------------
        folder = stack.enter_context(RunFolder(workdir, relevant(config), allow=allow, warm_start=True))
        saved = newest_step(folder.path("checkpoints"))
        if saved is not None:
            signals.expect(f"interrupted: the same command goes on from step {saved}")
        out = folder.path("model")
        there = os.path.isdir(out)
        if there and not outdated(folder):
            print(f"warm start: {out} is there already")
            return

        # ---- 2. Tokenizer, traces, decoder -------------------------------------------------------------------------
        with entry.user_mistakes():
            tokenizer_folder = settle_tokenizer(config, folder)
            tokenizer = Tokenizer(tokenizer_folder)
            decoder = decoder_config(config, tokenizer)
            traces = (FileTraces if config.sft.traces_file else ArithmeticTraces)(config, tokenizer)
            learner = learner_of(config, decoder, longest=traces.longest)

        # ---- 3. Begin, or go on ------------------------------------------------------------------------------------
        checkpoints = Checkpoints(folder.path("checkpoints"), keep=2)
        stack.callback(checkpoints.close)
        with entry.user_mistakes():
            found = checkpoints.restore(learner.abstract_state)
            if found is None:
                learner.start(initial_params(config, decoder, learner))
        if found is not None:
            learner.state = found.state
        start = found.step if found else 0
        if start > config.sft.max_steps:
            raise ConfigError(
                f"config.sft.max_steps={config.sft.max_steps}: the checkpoint in --workdir={workdir} has {start} "
                "already; begin in another workdir"
            )

        def save(step: int) -> None:
            checkpoints.save(step, learner.state, manifest={"update": step}, arrays={"update": np.asarray([step])})

        if there:  # first, since the config that is written next is no longer this model's
            files.write_whole(folder.path(_OUTDATED), "model/ is of the config before\n")
        folder.resume(start)
        line = stack.enter_context(ProgressLine("warm start", updates=config.sft.max_steps, step=start))
        parameters = sum(x.size for x in jax.tree.leaves(learner.state["params"]))
        line.say(f"warm start: {parameters / 1e6:.2f}M parameters, {config.sft.max_steps} updates, from update {start}")
        if there:
            line.say(f"warm start: {out} is of the config before, and is replaced at the end")

        # ---- 4. The loop -------------------------------------------------------------------------------------------
        signals.be(signals.HOLD)
        for update in range(start, config.sft.max_steps):
            if signals.requested() and update > start:
                save(update)
                checkpoints.wait()
                signals.expect(f"interrupted: saved at step {update}; the same command goes on from there")
            signals.look()
            examples = traces.batch(update)
            sums = learner.update(segments(examples))
            step = update + 1
            if step % config.sft.log_every == 0 or step == config.sft.max_steps:
                values = {"loss": sums["loss"], "gradient_norm": sums["gradient_norm"], "row_use": sums["row_use"]}
                folder.metrics(step, {**values, "examples": len(examples), "tokens": sums["tokens"]})
            line.update(step=step, note=f"loss {sums['loss']:.3f}")
            if step % config.sft.checkpoint_every == 0 and step < config.sft.max_steps:
                save(step)

        # ---- 5. The model, whole or not at all ---------------------------------------------------------------------
        write_model_folder(
            out,
            params=learner.state["params"],
            decoder=decoder,
            tokenizer_dir=tokenizer_folder,
            dtype=config.model.sync_dtype,
            replace=True,
        )
        if os.path.exists(folder.path(_OUTDATED)):
            os.remove(folder.path(_OUTDATED))
        line.say(f"warm start: wrote {out}")


def run() -> None:
    command_flags.sft()
    entry.run_with_config(lambda config: main(config, flags.FLAGS.workdir, allow=flags.FLAGS.allow))


if __name__ == "__main__":
    run()
