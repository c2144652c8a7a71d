"""scalerl-sft: the supervised warm start, from your traces or from those that an environment makes.

    scalerl-sft --config=configs/quickstart.py --workdir=runs/quickstart-warm-start [--config.a.b=v]

    loss             - (1 / loss tokens of the update) * sum of log p over the completions' tokens
    evaluation_loss  the same over config.sft.evaluation_traces traces that are not trained on

Trains a new decoder (config.sft.model_file, or the sizes in config.sft) with a tokenizer made from its traces, or the
policy in config.sft.model_path, and writes WORKDIR/model: a Hugging Face folder, whole or not at all. Prompts of files
are rendered as config.environment says, or as all parts of a mixture do; those of environments as each of them does.
Everything random is a function of (seed, update), so a run that is killed and started again ends with the same model.
The evaluation before the first update is the row of step 0 in metrics.jsonl.

The workdir records only the fields that the warm start depends on; others may change, and the model stays. If one of
them is changed on purpose (--allow), training continues from the newest checkpoint and replaces the model at the end.

Answers are not evaluated here; scalerl-train does that at step 0.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import flags

from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config, EnvironmentConfig, ObjectiveConfig, OptimizerConfig
from scalerl_jax.config_check import ConfigError
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.learner.checkpoint import Checkpoints, newest_step
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.packing import plain
from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.model.decoder import Params, init_params
from scalerl_jax.model.decoder_config import SIZES, DecoderConfig, check_folder, config_of_file, read_config
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.model.lora import write_adapter
from scalerl_jax.model.safetensors_folder import Tensors
from scalerl_jax.run import continuing, jsonl
from scalerl_jax.run.folder import RunFolder, explain_write_errors
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.system import files, signals
from scalerl_jax.traces import built_in, trace_files
from scalerl_jax.traces.example import Example, segments

# The gradient is clipped: the first updates of a new decoder are steep.
_ADAMW = OptimizerConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, max_grad_norm=1.0)
_CROSS_ENTROPY = ObjectiveConfig(loss="cross_entropy")  # type: ignore[arg-type]  # no loss of RL
_FINAL_RATE = 0.1  # of the peak, at the end of the cosine
_EVALUATED_ROWS = 8  # micro-batches that are scored at once
_OUTDATED = "model.outdated"  # beside a model that a changed config will replace
_TAKEN = "traces_taken"  # traces of files taken before the next update, in a checkpoint's manifest
_INITIAL = 4  # a stream of random numbers, separate from those of traces/built_in.py and environments/arithmetic.py


# ---- The decoder and its tokenizer ---------------------------------------------------------------------------------


def settle_tokenizer(config: Config, folder: RunFolder, *, begun: bool) -> str:
    """The folder of the tokenizer: the start model's, or one made here (whole or not at all).

    begun: whether there is a checkpoint. Until then the config may change, so the tokenizer is made again.
    """
    if config.sft.model_path:
        check_folder("config.sft.model_path", config.sft.model_path)
        return config.sft.model_path
    out = folder.path("tokenizer")
    if os.path.isdir(out) and not begun:
        shutil.rmtree(out)
    if not os.path.isdir(out):
        with files.whole_folder(out) as folder_there:
            corpus = (trace_files if config.sft.traces else built_in).corpus(config)
            make_tokenizer(corpus=corpus, path=folder_there, vocabulary=config.sft.vocab_size)
    return out


def decoder_config(config: Config, tokenizer: Tokenizer) -> DecoderConfig:
    """The decoder to train. Raises ValueError naming the field or file at fault."""
    sft = config.sft
    if sft.model_path:
        decoder = read_config(sft.model_path)
        tokenizer.check_vocabulary(decoder.vocab_size)
        return decoder
    if sft.model_file:
        try:
            decoder = config_of_file(sft.model_file)
        except OSError as error:
            raise ValueError(f"config.sft.model_file={sft.model_file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"config.sft.model_file={error}") from error
    else:
        sizes = {name: getattr(sft, name) for name in SIZES}
        # At these sizes an untied head would be a third of the parameters.
        decoder = DecoderConfig(**sizes, tied_embeddings=True)
    if decoder.vocab_size < tokenizer.vocabulary:
        raise ValueError(f"the decoder has {decoder.vocab_size} tokens, the tokenizer {tokenizer.vocabulary}")
    return dataclasses.replace(decoder, stop_token_ids=tokenizer.stop_ids)


def schedule_of(config: Config) -> optax.Schedule:
    """The learning rate of each update."""
    sft = config.sft
    if sft.schedule == "constant":
        constant = optax.constant_schedule(sft.learning_rate)
        if not sft.warmup_steps:
            return constant
        warmed_up = optax.linear_schedule(0.0, sft.learning_rate, sft.warmup_steps)
        return optax.join_schedules([warmed_up, constant], [sft.warmup_steps])
    steps = max(sft.max_steps, sft.warmup_steps + 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, sft.learning_rate, sft.warmup_steps, steps, sft.learning_rate * _FINAL_RATE
    )


def trainer_of(config: Config, decoder: DecoderConfig, *, longest: int) -> Trainer:
    """longest: tokens of the longest example."""
    sft = config.sft
    return make_trainer(
        config,
        decoder,
        max_segment=min(longest, sft.seq_len),
        seq_len=sft.seq_len,
        rows_per_step=sft.rows_per_step,
        objective=_CROSS_ENTROPY,
        optimizer=dataclasses.replace(_ADAMW, weight_decay=sft.weight_decay),
        adapted=bool(sft.model_path),
    )


def initial_params(config: Config, decoder: DecoderConfig, trainer: Trainer, dtype: Any) -> Params:
    if config.sft.model_path:
        return load_hf(config.sft.model_path, trainer.mesh, dtype)[1]
    seed = int(np.random.default_rng([config.seed, _INITIAL]).integers(2**31))
    return init_params(decoder, jax.random.key(seed), trainer.mesh)


def relevant(config: Config) -> Config:
    """The fields that the warm start depends on; the rest at their defaults, so that it may change between runs.

    Raises ValueError if the parts of a mixture do not agree on how the prompts of files are rendered.
    """
    kept = Config(seed=config.seed, sft=config.sft, telemetry=config.telemetry)
    if config.sft.model_path:  # a new decoder has no adapter
        kept.lora = config.lora
    if config.sft.traces:
        kept.environment = _relevant(trace_files.asking(config)[1].environment, made_here=False)
    elif not config.mixture:
        kept.environment = _relevant(config.environment, made_here=True)
    else:
        made_here = {n: e for n, e in config.mixture.items() if e.name in built_in.BUILT_IN}
        kept.mixture = {
            name: dataclasses.replace(_relevant(environment, made_here=True), weight=environment.weight)
            for name, environment in made_here.items()
        }
    kept.rollout.interruption_text = config.rollout.interruption_text
    kept.rollout.end_of_thinking = config.rollout.end_of_thinking
    kept.rollout.thinking_budget_max = int(config.rollout.thinking_budget_max > 0)
    kept.rollout.thinking_budget_min = 0
    if not config.sft.traces:  # traces of files are interrupted or not, whatever the config
        kept.rollout.length_control = config.rollout.length_control
    for name in ("compute_dtype", "sync_dtype", "head_precision"):
        setattr(kept.model, name, getattr(config.model, name))
    return kept


def _relevant(environment: EnvironmentConfig, *, made_here: bool) -> EnvironmentConfig:
    kept = EnvironmentConfig()
    made = ("name", "minimum_terms", "maximum_terms") if made_here else ()
    for name in (*trace_files.ASKING, *made):
        setattr(kept, name, getattr(environment, name))
    return kept


def evaluation_loss(trainer: Trainer, examples: Sequence[Example]) -> float:
    """The mean negative log-likelihood of the examples' loss tokens, in nats."""
    total, count = 0.0, 0
    capacity = _EVALUATED_ROWS * trainer.rows * trainer.seq_len  # positions at once, which bounds the memory
    some: list[Example] = []
    for at, example in enumerate(examples):
        some.append(example)
        following = len(examples[at + 1].tokens) if at + 1 < len(examples) else capacity
        if sum(len(example.tokens) for example in some) + following > capacity:
            for scored, example in zip(trainer.score([plain(example.tokens) for example in some]), some, strict=True):
                total -= float(scored[example.trained].sum(dtype=np.float64))
                count += int(example.trained.sum())
            some = []
    return total / count


# ---- The run -------------------------------------------------------------------------------------------------------


def outdated(folder: RunFolder) -> bool:
    """Whether the existing model was made with another config than the current one, so that it must be made again."""
    changed = any(change.kind != continuing.FREE for change in folder.changes)
    return changed or os.path.exists(folder.path(_OUTDATED))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(config: Config, workdir: str, *, allow: Sequence[str] = ()) -> None:
    signals.be(signals.EXIT)
    signals.expect("interrupted before the first update: the same command begins again")
    with explain_write_errors(workdir), contextlib.ExitStack() as stack:
        # ---- 1. The run folder; nothing to do if the model exists --------------------------------------------------
        chosen = continuing.settle_dtypes(config, workdir)
        with entry.user_mistakes():
            kept = relevant(config)
        folder = stack.enter_context(RunFolder(workdir, kept, allow=allow, warm_start=True))
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
            tokenizer_folder = settle_tokenizer(config, folder, begun=saved is not None)
            tokenizer = Tokenizer(tokenizer_folder)
            decoder = decoder_config(config, tokenizer)
            if config.sft.model_path and saved is None:
                Tensors(config.sft.model_path, decoder)  # faults there are reported before traces are tokenized
            traces: built_in.BuiltInTraces | trace_files.FileTraces
            if config.sft.traces:
                traces = trace_files.FileTraces(
                    config, tokenizer, folder.path("traces"), begun=saved is not None, log=_log
                )
            else:
                traces = built_in.BuiltInTraces(config, tokenizer)
            held_out = traces.evaluation()
            longest = max([traces.longest, *(len(example.tokens) for example in held_out)])
            trainer = trainer_of(config, decoder, longest=longest)

        # ---- 3. Begin, or resume -----------------------------------------------------------------------------------
        checkpoints = Checkpoints(folder.path("checkpoints"), keep=2)
        stack.callback(checkpoints.close)
        with entry.user_mistakes():
            found = trainer.restore(checkpoints, begin=lambda dtype: initial_params(config, decoder, trainer, dtype))
        if found is not None and isinstance(traces, trace_files.FileTraces) and _TAKEN in found.manifest:
            traces.go_on(found.step, found.manifest[_TAKEN])
        start = found.step if found else 0
        if start > config.sft.max_steps:
            raise ConfigError(
                f"config.sft.max_steps={config.sft.max_steps}: the checkpoint in --workdir={workdir} has {start} "
                "already; begin in another workdir"
            )

        def save(step: int) -> None:
            manifest = {"update": step}
            if isinstance(traces, trace_files.FileTraces):
                manifest[_TAKEN] = traces.taken
            trainer.save(checkpoints, step, manifest=manifest, arrays={"update": np.asarray([step])})

        if there:  # first, since the config written next is no longer this model's
            files.write_whole(folder.path(_OUTDATED), "model/ is of the config before\n")
        if not start and os.path.exists(folder.path("metrics.jsonl")):
            jsonl.cut(folder.path("metrics.jsonl"), -1)  # the row of step 0 is rewritten
        folder.resume(start)
        line = stack.enter_context(ProgressLine("warm start", updates=config.sft.max_steps, step=start))
        parameters = sum(x.size for x in jax.tree.leaves(trainer.state["params"]))
        line.log(f"warm start: {parameters / 1e6:.2f}M parameters, {config.sft.max_steps} updates, from update {start}")
        for remark in (*chosen, trainer.attention_note, *traces.notes):
            line.log(f"warm start: {remark}")
        if there:
            line.log(f"warm start: {out} is of the config before, and is replaced at the end")
        evaluated = ""
        if held_out and not start:
            loss = evaluation_loss(trainer, held_out)
            folder.metrics(0, {"evaluation_loss": loss})
            line.log(f"warm start: evaluation loss {loss:.4f} before the first update")

        # ---- 4. The loop -------------------------------------------------------------------------------------------
        rate = jax.jit(schedule_of(config))
        signals.be(signals.HOLD)
        for update in range(start, config.sft.max_steps):
            if signals.requested() and update > start:
                save(update)
                checkpoints.wait()
                signals.expect(f"interrupted: saved at step {update}; the same command goes on from there")
            signals.raise_if_interrupted()
            with entry.user_mistakes():
                examples = traces.batch(update)
            pending, learning_rate = trainer.forward_backward(segments(examples)), float(rate(update))
            with entry.user_mistakes(
                FloatingPointError, before=f"config.sft.learning_rate={config.sft.learning_rate:g}: "
            ):
                sums = trainer.optim_step(pending, learning_rate=learning_rate)
            step = update + 1
            values = {"loss": sums["loss"], "gradient_norm": sums["gradient_norm"], "row_use": sums["row_use"]}
            values |= {"examples": len(examples), "tokens": sums["tokens"]}
            last = step == config.sft.max_steps
            evaluate = bool(held_out) and (step % config.sft.evaluation_every == 0 or last)
            if evaluate:
                values["evaluation_loss"] = evaluation_loss(trainer, held_out)
                evaluated = f", evaluation {values['evaluation_loss']:.3f} at step {step}"
            if evaluate or step % config.sft.log_every == 0 or last:
                folder.metrics(step, values)
            line.update(step=step, note=f"loss {sums['loss']:.3f}{evaluated}")
            if step % config.sft.checkpoint_every == 0 and step < config.sft.max_steps:
                save(step)

        # ---- 5. The model, whole or not at all ---------------------------------------------------------------------
        if trainer.lora is not None:
            model, adapter = os.path.abspath(config.sft.model_path), folder.path("adapter")
            trained = trainer.state["params"]
            write_adapter(adapter, trained, trainer.lora, model=model, base=trainer.base, replace=True)
            line.log(f"warm start: wrote {adapter}")
        write_model_folder(
            out,
            params=trainer.policy,
            decoder=decoder,
            tokenizer_dir=tokenizer_folder,
            dtype=config.model.sync_dtype,
            replace=True,
        )
        if os.path.exists(folder.path(_OUTDATED)):
            os.remove(folder.path(_OUTDATED))
        line.log(f"warm start: wrote {out}")


def run() -> None:
    command_flags.sft()

    def start(config: Config) -> None:
        if flags.FLAGS.exit_with_parent:
            signals.request_with_parent()
        main(config, flags.FLAGS.workdir, allow=flags.FLAGS.allow)

    entry.run_with_config(start)


if __name__ == "__main__":
    run()
