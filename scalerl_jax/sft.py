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
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import optax
from absl import flags

from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.config_names import ConfigError
from scalerl_jax.environments import arithmetic
from scalerl_jax.environments.text_rows import read_jsonl
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.learner import optimizer
from scalerl_jax.learner.checkpoint import Checkpoints, newest_step, told_where_it_goes_on
from scalerl_jax.learner.packing import Segment, pack
from scalerl_jax.learner.step import Layout, Learner
from scalerl_jax.model.decoder import Params, Precision, init_params
from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.objective.losses import cross_entropy
from scalerl_jax.run import continuing
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.system import files, signals

_GRADIENT_CLIP = 1.0  # global norm: the first updates of a new decoder are steep
_BETA2 = 0.95
_EPSILON = 1e-8
_FINAL_RATE = 0.1  # of the peak, at the end of the cosine
_OUTDATED = "model.outdated"  # beside a model that a changed config is making again
_TRACES, _INITIAL = 3, 4  # streams of random numbers, beside those of environments/arithmetic.py


# ---- Traces: (prompt, pieces of the completion) to segments --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Example:
    """A trace in tokens."""

    tokens: np.ndarray  # [t] int32, prompt, completion, end of sequence
    trained: np.ndarray  # [t] bool, the loss tokens


def tokenize(prompt: str, pieces: Sequence[arithmetic.Piece], tokenizer: Tokenizer) -> Example:
    """The prompt is context, and so are pieces that are not trained on; the completion ends with the stop token."""
    tokens = tokenizer.encode_prompt(prompt)
    trained = [False] * len(tokens)
    for piece in pieces:
        ids = tokenizer.encode(piece.text)
        tokens += ids
        trained += [piece.trained] * len(ids)
    if tokens[-1] not in tokenizer.stop_ids:
        tokens.append(tokenizer.eos_id)
        trained.append(True)
    return Example(np.asarray(tokens, np.int32), np.asarray(trained))


def fill(examples: Iterator[Example], *, rows: int, length: int) -> list[Example]:
    """Takes from the stream what fills `rows` rows of `length` positions, and no more than packing puts there."""
    taken: list[Example] = []
    row, room = 1, length
    for example in examples:
        positions = len(example.tokens) - 1
        if positions > room:
            row, room = row + 1, length
            if row > rows:
                break
        room -= positions
        taken.append(example)
    # Taken row by row; packing places the longest first, which now and then needs one row more.
    while max(place.row for place in pack(segments(taken), length=length, rows=len(taken))[1]) >= rows:
        taken.pop()
    return taken


def segments(examples: Sequence[Example]) -> list[Segment]:
    """Each loss token weighs 1 / all loss tokens of the update."""
    weight = 1.0 / sum(int(example.trained.sum()) for example in examples)
    out = []
    for example in examples:
        blank = np.zeros(len(example.tokens), np.float32)
        out.append(Segment(example.tokens, (weight * example.trained).astype(np.float32), blank, blank))
    return out


class ArithmeticTraces:
    """The built-in task's traces, made as they are needed, from training problems only."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        # Interruptions are part of what is taught only where the run will interrupt.
        self._phrase = config.rollout.interruption_text if config.rollout.thinking_budget_max else ""
        term = len(tokenizer.encode("+9=9")) + len(tokenizer.encode("+9"))
        fixed = tokenize("9=", [arithmetic.Piece("<think>9" + self._phrase + "</think>9")], tokenizer)
        self.longest = len(fixed.tokens) + term * (config.environment.maximum_terms - 1)  # tokens

    def batch(self, update: int) -> list[Example]:
        config = self._config
        rng = np.random.default_rng([config.seed, _TRACES, update])

        def examples() -> Iterator[Example]:
            while True:
                problem = arithmetic.draw(
                    rng,
                    minimum_terms=config.environment.minimum_terms,
                    maximum_terms=config.environment.maximum_terms,
                    validation=False,
                )
                pieces = arithmetic.trace(problem, rng, error_rate=config.sft.error_rate, phrase=self._phrase)
                yield tokenize(problem.text, pieces, self._tokenizer)

        return fill(examples(), rows=config.sft.rows_per_step, length=config.sft.seq_len)


class FileTraces:
    """The rows of a JSONL file of {"prompt", "completion"}, epoch after epoch, each in an order of its own.

    Raises ValueError naming a row that does not fit into config.sft.seq_len.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config = config
        self._examples = []
        for prompt, completion, where in read_traces(config.sft.traces_file):
            example = tokenize(prompt, [arithmetic.Piece(completion)], tokenizer)
            if len(example.tokens) - 1 > config.sft.seq_len:
                raise ValueError(
                    f"{where}: has {len(example.tokens)} tokens, a row holds {config.sft.seq_len + 1} "
                    "(config.sft.seq_len)"
                )
            self._examples.append(example)
        if not self._examples:
            raise ValueError(f"{config.sft.traces_file}: no traces there")
        self.longest = max(len(example.tokens) for example in self._examples)
        self._next, self._taken = 0, 0  # update that comes next; examples taken before it

    def batch(self, update: int) -> list[Example]:
        if update < self._next:
            self._next, self._taken = 0, 0
        while True:  # what an update takes depends on those before it
            taken = fill(
                self._stream(self._taken), rows=self._config.sft.rows_per_step, length=self._config.sft.seq_len
            )
            self._next, self._taken = self._next + 1, self._taken + len(taken)
            if self._next > update:
                return taken

    def _stream(self, start: int) -> Iterator[Example]:
        count = len(self._examples)
        for epoch in itertools.count(start // count):
            order = np.random.default_rng([self._config.seed, _TRACES, epoch]).permutation(count)
            for at in range(start % count if epoch == start // count else 0, count):
                yield self._examples[order[at]]


def read_traces(path: str) -> Iterator[tuple[str, ...]]:
    return read_jsonl(path, "config.sft.traces_file", ("prompt", "completion"))


# ---- The decoder and its tokenizer ---------------------------------------------------------------------------------


def corpus(config: Config) -> Iterator[str]:
    """What a new tokenizer is made from: the traces, and the interruption phrase as often as its words need."""
    if not config.sft.traces_file:
        yield from arithmetic.corpus(
            minimum_terms=config.environment.minimum_terms,
            maximum_terms=config.environment.maximum_terms,
            seed=config.seed,
            phrase=config.rollout.interruption_text,
        )
        return
    for prompt, completion, _ in read_traces(config.sft.traces_file):
        yield prompt + completion
        yield config.rollout.interruption_text


def settle_tokenizer(config: Config, folder: RunFolder) -> str:
    """The folder of the tokenizer: the start model's, or one made here (whole or not at all)."""
    if config.sft.model_path:
        return config.sft.model_path
    out = folder.path("tokenizer")
    if not os.path.isdir(out):
        temporary = f"{out}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while it wrote
        try:
            make_tokenizer(corpus=corpus(config), path=temporary, vocabulary=config.sft.vocab_size)
            os.replace(temporary, out)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if (fault := files.write_error(error, out)) is not None:
                raise fault from None
            raise
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
        decoder = DecoderConfig(
            vocab_size=sft.vocab_size,
            hidden_size=sft.hidden_size,
            layers=sft.layers,
            heads=sft.heads,
            kv_heads=sft.kv_heads,
            head_dim=sft.head_dim,
            intermediate_size=sft.intermediate_size,
            tied_embeddings=True,  # at these sizes a head of its own would be a third of the parameters
        )
    if decoder.vocab_size < tokenizer.vocabulary:
        raise ValueError(f"the decoder has {decoder.vocab_size} tokens, the tokenizer {tokenizer.vocabulary}")
    return dataclasses.replace(decoder, stop_token_ids=tokenizer.stop_ids)


def make_learner(config: Config, decoder: DecoderConfig, *, longest: int) -> Learner:
    """`longest`: tokens of the longest example."""
    sft, mesh = config.sft, make_mesh(
        replica=config.learner.replica, fsdp=config.learner.fsdp, tensor=config.learner.tensor
    )  # fmt: skip
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        sft.learning_rate,
        sft.warmup_steps,
        max(sft.max_steps, sft.warmup_steps + 1),
        sft.learning_rate * _FINAL_RATE,
    )
    return Learner(
        decoder=decoder,
        optimizer=optimizer.adamw(
            schedule,
            beta1=0.9,
            beta2=_BETA2,
            epsilon=_EPSILON,
            weight_decay=sft.weight_decay,
            clip=_GRADIENT_CLIP,
        ),
        mesh=mesh,
        precision=Precision(config.model.compute_dtype, config.model.sync_dtype, config.model.head_precision),
        loss=cross_entropy,
        layout=Layout(
            seq_len=sft.seq_len,
            # As many rows at once as an RL update computes, and no more than there are.
            rows=shards * min(config.learner.micro_batch_rows, -(-sft.rows_per_step // shards)),
            max_segment=min(longest, sft.seq_len),
            logprob_chunk=config.learner.logprob_chunk,
            remat=config.model.remat,
        ),
    )


def initial_params(config: Config, decoder: DecoderConfig, learner: Learner) -> Params:
    if config.sft.model_path:
        return load_hf(config.sft.model_path, learner.mesh)[1]
    return init_params(decoder, jax.random.key(_fold(config.seed)), learner.mesh)


def _fold(seed: int) -> int:
    return int(np.random.default_rng([seed, _INITIAL]).integers(2**31))


def relevant(config: Config) -> Config:
    """The fields that the warm start depends on; the rest at their defaults, so that it may change between runs."""
    kept = Config(seed=config.seed, sft=config.sft, telemetry=config.telemetry)
    if not config.sft.traces_file:
        kept.environment.minimum_terms, kept.environment.maximum_terms = (
            config.environment.minimum_terms,
            config.environment.maximum_terms,
        )
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


def replace_model(out: str, write: Callable[[str], None]) -> None:
    """Puts what `write` makes into the place of the folder `out`; a kill leaves the old one, the new one, or none."""
    new, old = f"{out}.new", f"{out}.old"
    for left in (new, old):  # of a run that was killed here
        shutil.rmtree(left, ignore_errors=True)
    write(new)
    with files.naming(out):
        if os.path.isdir(out):
            os.rename(out, old)
        os.rename(new, out)
    shutil.rmtree(old, ignore_errors=True)


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
            learner = make_learner(config, decoder, longest=traces.longest)

        # ---- 3. Begin, or go on ------------------------------------------------------------------------------------
        checkpoints = Checkpoints(folder.path("checkpoints"), keep=2)
        stack.callback(checkpoints.close)
        with entry.user_mistakes():
            found = checkpoints.restore(learner.abstract_state())
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
        def write(path: str) -> None:
            write_model_folder(
                path,
                params=learner.state["params"],
                decoder=decoder,
                tokenizer_dir=tokenizer_folder,
                dtype=config.model.sync_dtype,
            )

        replace_model(out, write)
        if os.path.exists(folder.path(_OUTDATED)):
            os.remove(folder.path(_OUTDATED))
        line.say(f"warm start: wrote {out}")


def run() -> None:
    command_flags.sft()
    entry.run_with_config(lambda config: main(config, flags.FLAGS.workdir, allow=flags.FLAGS.allow))


if __name__ == "__main__":
    run()
