"""scalerl-train: trains a policy with the ScaleRL recipe, or goes on where a run stopped.

    scalerl-train --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=v]
                  [--servers=host:port,... | file:PATH | dns:///name:port]

One loop over batches. Batch b is trained on when the policy is version b, and makes version b + 1:

    groups   <- fleet.batch(b)          by number, waiting for stragglers and saying for whom
    batch    <- scores to rewards, advantages, one weight per loss token      learner/batch.py
    update   <- accumulate as often as the batch needs, then apply              learner/step.py
    publish  <- version b + 1 goes out to all servers while the next batch is awaited
    evaluate, checkpoint, write down

Without --servers, local ones are started and supervised as config.fleet says.
"""

import contextlib
import functools
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from absl import flags

from launch import accelerators
from launch.local import LocalServers, StartError, serve_command, stop_seconds
from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments.curriculum import Curriculum, NoPromptLeft
from scalerl_jax.environments.load import load_rows, make_environment
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.scorer_pool import ScorerError
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner import optimizer
from scalerl_jax.learner.checkpoint import Checkpoints, newest_step, told_where_it_goes_on
from scalerl_jax.learner.step import Layout, Learner
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from scalerl_jax.model.hf import Tensors, load_hf
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.objective import policy_loss
from scalerl_jax.report import summary
from scalerl_jax.report.writer import ReportWriter
from scalerl_jax.rollouts import pacing as pacing_lib
from scalerl_jax.rollouts.errors import FleetError, ProbeError
from scalerl_jax.rollouts.fleet import Fleet, Servers
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.parity.handshake import Expected, Probe
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers import credentials as credentials_lib
from scalerl_jax.rollouts.servers.discovery import Addresses
from scalerl_jax.rollouts.weights.sync_stats import SyncStats
from scalerl_jax.run import continuing
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.ledger import Ledger, ModelShape
from scalerl_jax.run.live_forecast import LiveForecast
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.system import platforms, signals
from scalerl_jax.trainer import Draws, Trainer, observe, score

FLAGS = flags.FLAGS


def make_learner(config: Config, decoder: DecoderConfig, *, max_segment: int) -> Learner:
    """The learner of a run on all devices there are."""
    mesh = make_mesh(replica=config.learner.replica, fsdp=config.learner.fsdp, tensor=config.learner.tensor)
    return Learner(
        decoder=decoder,
        optimizer=optimizer.from_config(config.optimizer),
        mesh=mesh,
        precision=Precision(config.model.compute_dtype, config.model.sync_dtype, config.model.head_precision),
        loss=functools.partial(policy_loss, objective=config.objective),
        layout=Layout(
            seq_len=config.learner.seq_len,
            rows=config.learner.micro_batch_rows * mesh.shape["replica"] * mesh.shape["fsdp"],
            max_segment=max_segment,
            logprob_chunk=config.learner.logprob_chunk,
            remat=config.model.remat,
        ),
    )


def make_pacing(config: Config, *, start: int) -> pacing_lib.Pacing:
    """The run's pacing, from version `start` on."""
    common = {
        "k": config.pacing.max_off_policy_steps,
        "groups": config.rollout.prompts_per_step,
        "batches": config.max_steps,
        "start": start,
    }
    if config.pacing.kind == "phased":
        return pacing_lib.Phased(**common)
    return pacing_lib.Pipeline(**common, max_buffered_batches=config.pacing.max_buffered_batches)


def start_servers(
    config: Config,
    workdir: str,
    *,
    maximum_tokens: int,
    stopping: threading.Event,
    sharing: accelerators.Sharing | None,
) -> LocalServers:
    """Local generators, supervised; returns when they serve. Raises entry.UserError where one cannot start."""
    fleet = config.fleet
    gpu_memory, environments = (sharing.vllm_memory, sharing.servers) if sharing is not None else (None, [])
    try:
        command = serve_command(config, model=config.model.path, maximum_tokens=maximum_tokens, gpu_memory=gpu_memory)
        return LocalServers(
            command,
            count=fleet.servers,
            workdir=workdir,
            threads=fleet.threads,
            start_seconds=fleet.start_seconds,
            stopping=stopping,
            environments=environments,
            stop_seconds=stop_seconds(fleet.engine),
        )
    except StartError as error:
        raise entry.UserError(str(error)) from error


def stop_servers(local: Future[LocalServers], stopping: threading.Event) -> None:
    """Of local servers that serve, or are about to: those that could not start have stopped by themselves."""
    stopping.set()
    if local.exception() is None:
        local.result().close()


def too_few(config: Config, *, training: int, held_out: int) -> list[str]:
    """Lines on there being fewer prompts than the config asks for. Raises UserError where none is held out."""
    said = []
    if not held_out:
        raise entry.UserError("config.evaluation.prompts: there is no held-out prompt, and so nothing to evaluate on")
    if held_out < config.evaluation.prompts:
        asked = f"config.evaluation.prompts={config.evaluation.prompts}"
        said.append(f"{asked}: there are {held_out} held-out prompts, and all of them are used")
    if training < config.rollout.prompts_per_step:
        asked = f"config.rollout.prompts_per_step={config.rollout.prompts_per_step}"
        said.append(f"{asked}: there are {training} training prompts, so a batch has some of them more than once")
    return said


def main(config: Config) -> None:
    signals.be(signals.EXIT)
    signals.expect("interrupted before the first update: the same command begins again")
    with told_where_it_goes_on(FLAGS.workdir), contextlib.ExitStack() as stack:
        # ---- 1. The run folder; the policy, the tokenizer and the task to start from ---------------------------------
        folder = stack.enter_context(RunFolder(FLAGS.workdir, config, allow=FLAGS.allow))
        saved = newest_step(folder.path("checkpoints"))
        if saved is not None:
            signals.expect(f"interrupted: the same command goes on from step {saved}")
            if saved > config.max_steps:
                raise entry.UserError(f"config.max_steps={config.max_steps}: the run has made {saved} updates already")
        with entry.user_mistakes():
            finished = saved == config.max_steps == folder.last_evaluation()
        if finished:
            summary.show(FLAGS.workdir)
            return
        with entry.user_mistakes():
            decoder = read_config(config.model.path)
            Tensors(config.model.path)  # a folder without weights is found before anything is started
            tokenizer = Tokenizer(config.model.path)
            train_prompts, validation_prompts = load_rows(config, tokenizer)
            requests = Requests(config, tokenizer)
            listed = Addresses(FLAGS.servers) if FLAGS.servers else None
            given = listed.look() if listed is not None else ()
            credentials = credentials_lib.read(config.fleet, name=listed.name if listed is not None else "")
            if listed is None and credentials.authority:
                raise ValueError("config.fleet.tls_authority: goes with --servers; local ones are reached without TLS")
        for fewer in too_few(config, training=len(train_prompts), held_out=len(validation_prompts)):
            print(fewer, file=sys.stderr)
        maximum_tokens = config.rollout.max_prompt_tokens + requests.maximum_tokens
        if maximum_tokens > config.learner.seq_len + 1:
            raise entry.UserError(
                f"config.learner.seq_len={config.learner.seq_len}: a prompt and its completion may have "
                f"{maximum_tokens} tokens (longest prompt, thinking and answer budgets, interruption phrase)"
            )

        # How the processes of this machine share its GPUs is settled before JAX first looks for them.
        sharing = None
        if not given:
            with entry.user_mistakes():
                sharing = accelerators.share_out(
                    servers=config.fleet.servers, share=config.fleet.gpu_share, engine=config.fleet.engine
                )
        if sharing is not None:
            os.environ.update(sharing.trainer)

        # Everything from here on is compute of the run.
        with entry.user_mistakes():
            ledger = Ledger(
                folder.path("ledger.json"),
                trainer_devices=jax.device_count(),
                shape=ModelShape.of(decoder),
            )

        # ---- 2. Local servers start while the update is compiled -----------------------------------------------------
        starter = stack.enter_context(ThreadPoolExecutor(1))
        local: Future[LocalServers] | None = None
        if not given:
            stopping = threading.Event()
            local = starter.submit(
                start_servers,
                config,
                folder.workdir,
                maximum_tokens=maximum_tokens,
                stopping=stopping,
                sharing=sharing,
            )
            stop = functools.partial(stop_servers, local, stopping)
            stack.callback(stop)
            signals.before_exit(stop)
        with entry.user_mistakes():
            learner = make_learner(config, decoder, max_segment=maximum_tokens)

        # ---- 3. Begin, or go on: parameters, optimizer, history of every prompt, logs --------------------------------
        curriculum = Curriculum(
            prompts=len(train_prompts),
            no_positive_resampling_at=config.curriculum.no_positive_resampling_at,
            k=config.pacing.max_off_policy_steps,
            groups_per_batch=config.rollout.prompts_per_step,
            seed=config.seed,
        )
        checkpoints = Checkpoints(folder.path("checkpoints"), keep=config.checkpoint.keep)
        stack.callback(checkpoints.close)
        with entry.user_mistakes():
            found = checkpoints.restore(learner.abstract_state())
            if found is None:
                learner.start(load_hf(config.model.path, learner.mesh)[1])
            else:
                learner.state = found.state
                curriculum.restore(found.arrays)
                folder.outrank(found.manifest["incarnation"])
        start = found.step if found else 0
        with entry.user_mistakes():
            folder.resume(start)
        draws = Draws(curriculum, train_prompts)
        learner.compile()
        if local is not None:
            given = local.result().addresses

        # ---- 4. Meet the fleet ---------------------------------------------------------------------------------------
        probe = Probe(
            config.parity,
            expected=Expected(
                tokenizer_fingerprint=tokenizer_fingerprint(config.model.path),
                model_config=decoder.canonical_json(),
                head_precision=config.model.head_precision,
                sync_dtype=config.model.sync_dtype,
                maximum_tokens=maximum_tokens,
            ),
            score=functools.partial(score, learner),
            dtype=config.model.compute_dtype
            if config.model.compute_dtype == "bfloat16"
            else config.fleet.compute_dtype,
        )
        pushes = SyncStats()
        with entry.user_mistakes(ScorerError):
            scorer = Scorer(make_environment(config), config, decode=tokenizer.decode_completion)
            stack.enter_context(scorer)
        fleet = Fleet(
            config,
            servers=Servers(
                given,
                probe_prompts=train_prompts,
                look=listed.look if listed is not None and listed.changes else None,
                credentials=credentials,
                vocabulary=decoder.vocab_size,
                check=probe.check,
            ),
            requests=requests,
            buffer=requests.training_groups(make_pacing(config, start=start), draws.draw, trained=start),
            incarnation=Incarnation(folder.incarnation, lambda value: folder.outrank(value - 1)),
            score=scorer.score,
            on_event=pushes.event,
            observe=functools.partial(observe, ledger),
        )
        stack.callback(fleet.close)
        line = stack.enter_context(ProgressLine("train", updates=config.max_steps, step=start))
        report = stack.enter_context(ReportWriter(folder.workdir))
        forecast = stack.enter_context(LiveForecast(updates=config.max_steps, say=line.say))
        trainer = Trainer(
            config=config,
            folder=folder,
            ledger=ledger,
            learner=learner,
            checkpoints=checkpoints,
            tokenizer=tokenizer,
            draws=draws,
            validation=validation_prompts,
            fleet=fleet,
            probe=probe,
            pushes=pushes,
            line=line,
            report=report,
            forecast=forecast,
            check=local.result().check if local is not None else lambda: None,
        )
        if sharing is not None:
            line.say(sharing.sentence)
        if found:
            line.say(f"going on from step {start} of {config.max_steps}")
        for change in folder.changes:
            if change.kind != continuing.FREE:
                line.say(f"from step {start} on config.{change.name} is {change.now!r}; before: {change.before!r}")

        # ---- 5. The loop ---------------------------------------------------------------------------------------------
        with entry.user_mistakes(FleetError, ProbeError, NoPromptLeft, ScorerError, StartError):
            fleet.start()
            # From here on a signal is only noted, and looked at where the state is that of a whole number of updates.
            signals.be(signals.HOLD)
            stack.enter_context(trainer.saved_when_interrupted())
            trainer.begin(start)
            save_due = False
            for number in range(start, config.max_steps):
                signals.look()
                trainer.train_on(number)
                step = number + 1
                if step % config.evaluation.every == 0 or step == config.max_steps:
                    trainer.evaluate(step)
                if step == config.max_steps:
                    trainer.finish_evaluations()
                # Not before the rows of earlier evaluations are written: a run that goes on from it would lack them.
                # But one that takes longer than the updates between two checkpoints does not hold them up.
                save_due |= step % config.checkpoint.every == 0 or step == config.max_steps
                if save_due and (not trainer.owes(step) or step - trainer.saved >= 2 * config.checkpoint.every):
                    trainer.save(step)
                    save_due = False

    # ---- 6. What came of it ------------------------------------------------------------------------------------------
    signals.expect("interrupted: the run is finished; the same command shows what came of it")
    signals.be(signals.EXIT)
    summary.show(FLAGS.workdir)


def run() -> None:
    command_flags.train()
    platforms.cpu_too()  # for the fits
    entry.run_with_config(main)


if __name__ == "__main__":
    run()
