"""scalerl-train: trains a policy with the ScaleRL recipe, or continues a run that stopped.

    scalerl-train --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=v]
                  [--servers=host:port,... | file:PATH | dns:///name:port]

On several hosts the same command runs on each. The first one runs what is below; the others compute their part of each
step on their own devices (hosts/).

Batch b is trained on when the policy is version b, and makes version b + 1. Section 5 is the loop over batches.
Without --servers, local rollout servers are started and supervised as config.fleet says.
"""

import contextlib
import sys

import jax
from absl import flags

from launch.local import StartError
from launch.starting import StartingServers
from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.environments import Row
from scalerl_jax.environments.curriculum import NoPromptLeft
from scalerl_jax.environments.prompts import Replies
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.scorer_pool import ScorerError
from scalerl_jax.gateway.agents import agents_of
from scalerl_jax.hosts.join import enter
from scalerl_jax.learner import memory_estimate
from scalerl_jax.learner.batch import build, off_policy_metrics, per_token
from scalerl_jax.learner.checkpoint import Checkpoints, newest_step
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.optimizer import learning_rate, step_scale
from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.model.hf import load_hf
from scalerl_jax.report import summary
from scalerl_jax.report.page import ReportWriter
from scalerl_jax.rollouts import pacing
from scalerl_jax.rollouts.fleet import Fleet
from scalerl_jax.rollouts.parity import Parity
from scalerl_jax.rollouts.servers.validate_status import FleetError, ProbeError
from scalerl_jax.rollouts.status import WaitTimes
from scalerl_jax.rollouts.weights.publisher import Incarnation, SyncStats
from scalerl_jax.run import collapse_guard, continuing, inputs, setup
from scalerl_jax.run.collapse_guard import Collapsed, CollapseGuard
from scalerl_jax.run.evaluations import Evaluations
from scalerl_jax.run.exporter import TrainerMetrics
from scalerl_jax.run.folder import RunFolder, explain_write_errors
from scalerl_jax.run.ledger import Ledger, ModelShape
from scalerl_jax.run.live_forecast import LiveForecast
from scalerl_jax.run.metrics import StepMetrics
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.run.saving import Saving
from scalerl_jax.system import maintenance, platforms, signals
from scalerl_jax.system.metrics_endpoint import MetricsEndpoint

FLAGS = flags.FLAGS


def main(config: Config) -> None:
    try:
        train(config)
    except Collapsed as end:
        print(end, file=sys.stderr)
        raise


def train(config: Config) -> None:
    signals.be(signals.EXIT)
    signals.expect("interrupted before the first update: the same command begins again")
    if FLAGS.exit_with_parent:
        signals.request_with_parent()
    with explain_write_errors(FLAGS.workdir), contextlib.ExitStack() as stack:
        # ---- 0. One host of several: the first continues here, the others run its commands and never return ---------
        with entry.user_mistakes():
            stack.enter_context(maintenance.watched(FLAGS.maintenance))
            lead = enter(config, FLAGS, stack)

        # ---- 1. The run folder; what the run starts from; its servers ------------------------------------------------
        chosen = continuing.settle_dtypes(config, FLAGS.workdir)
        folder = stack.enter_context(RunFolder(FLAGS.workdir, config, allow=FLAGS.allow))
        if FLAGS.from_step is not None:
            print(collapse_guard.go_back(FLAGS.workdir, FLAGS.from_step), file=sys.stderr)
            return
        goes_on = collapse_guard.check(FLAGS.workdir, on_collapse=config.checkpoint.on_collapse)
        saved = newest_step(folder.path("checkpoints"))
        if saved is not None:
            signals.expect(f"interrupted: the same command goes on from step {saved}")
            if saved > config.max_steps:
                raise entry.UserError(f"config.max_steps={config.max_steps}: the run has made {saved} updates already")
        with entry.user_mistakes():
            if saved == config.max_steps == folder.last_evaluation():
                summary.show(FLAGS.workdir)
                return
            given = setup.load(config, FLAGS.servers)
            rows, curriculum = given.rows, given.curriculum
            exported = TrainerMetrics(max_steps=config.max_steps, step=saved or 0)
            if FLAGS.metrics_port is not None:
                at = MetricsEndpoint(exported.collect, host=FLAGS.metrics_host, port=FLAGS.metrics_port)
                stack.enter_context(at)
                print(f"metrics at http://{FLAGS.metrics_host}:{at.port}/metrics", file=sys.stderr)
        print(*filter(None, [goes_on]), *chosen, *given.remarks, sep="\n", file=sys.stderr)
        with entry.user_mistakes(ScorerError):  # a wrong reward is reported before anything is started, too
            scorer = Scorer(
                config, decode=given.tokenizer.decode_completion, rows=rows.train,
                replies=Replies(config, given.tokenizer), turn_tokens=given.requests.turn_tokens,
            )  # fmt: skip
            stack.enter_context(scorer)
        with entry.user_mistakes():
            agents = stack.enter_context(agents_of(
                config, scorer, given.tokenizer, given.requests, folder=folder.path("sessions"),
                saved=lambda: newest_step(folder.path("checkpoints")) or 0,
            ))  # fmt: skip
        addresses, local = given.servers.addresses, None
        with entry.user_mistakes():
            folders = given.check_servers(config, seconds=config.fleet.status_seconds)
            if folders or not addresses:
                local = StartingServers(
                    config, folder.workdir, maximum_tokens=given.maximum_tokens, share=config.fleet.gpu_share,
                    generators=not addresses, teachers=folders,
                )  # fmt: skip
            # From here on all compute counts as the run's.
            ledger = Ledger(
                folder.path("ledger.json"),
                trainer_devices=jax.device_count(),
                shape=ModelShape.of(given.decoder, adapted=config.lora.rank > 0),
                reference=config.objective.reference_kl > 0,
            )
        if local is not None:
            stack.enter_context(local)  # they start while the update is compiled

        # ---- 2. The trainer: begin, or resume with parameters, optimizer, history of every prompt, logs --------------
        with entry.user_mistakes():
            if lead is not None:
                lead.begin(config, maximum_tokens=given.maximum_tokens, incarnation=folder.incarnation)
            make = lead.trainer if lead is not None else Trainer
            trainer = make_trainer(config, given.decoder, max_segment=given.maximum_tokens, make=make)
            checkpoints = Checkpoints(folder.path("checkpoints"), keep=config.checkpoint.keep)
            stack.callback(checkpoints.close)
            found = trainer.restore(checkpoints, begin=lambda dtype: load_hf(config.model.path, trainer.mesh, dtype)[1])
            if found is not None:
                with inputs.explain_changed_prompts(config, folder.changes):
                    curriculum.restore(found.arrays)
                folder.outrank(found.manifest["incarnation"])
            start = found.step if found else 0
            folder.resume(start)
            # Too little memory is reported here, and not at step 120.
            refuse = config.learner.too_little_memory == "refuse"
            memory_note = memory_estimate.check_memory(trainer, longest=given.maximum_tokens, refuse=refuse)

        # ---- 3. The fleet --------------------------------------------------------------------------------------------
        teachers = None
        with entry.user_mistakes(StartError):
            if not addresses:
                assert local is not None
                addresses = local.servers().addresses
            if given.teachers:
                served = {name: local.teacher(name).addresses for name in folders} if local is not None else {}
                teachers = given.teachers_at(config, served, observe=ledger.observe_teacher)
        sync_stats = SyncStats()

        def draw(number: int) -> Row:
            return rows.train[curriculum.draw(number)]

        fleet = Fleet(
            config,
            servers=given.servers_at(addresses),
            requests=given.requests,
            buffer=given.requests.training_groups(pacing.from_config(config, start=start), draw, trained=start),
            incarnation=Incarnation(folder.incarnation, lambda value: folder.outrank(value - 1)),
            score=scorer.score,
            episodes=scorer.episodes,
            agents=agents,
            teachers=teachers,
            on_event=sync_stats.event,
            observe=ledger.observe_status,
            serving=ledger.serving,
            parts=lead.parts(trainer) if lead is not None else None,
        )
        stack.callback(fleet.close)
        exported.fleet = fleet.status

        # ---- 4. Watching, evaluating, saving and logging -------------------------------------------------------------
        line = stack.enter_context(ProgressLine("train", updates=config.max_steps, step=start))
        report = stack.enter_context(ReportWriter(folder.workdir))
        forecast = stack.enter_context(LiveForecast(updates=config.max_steps, log=line.log))
        parity = Parity(config, expected=given.expected, score=trainer.score, fleet=fleet, log=line.log)
        waits = WaitTimes()
        guard = CollapseGuard(config, folder=folder, checkpoints=checkpoints, log=line.log)
        if lead is None:
            checkpoints.also = guard.kept

        def written() -> None:
            guard.evaluated(folder.evaluations()[-1])
            forecast.evaluated(folder.evaluations())
            exported.evaluated(folder.evaluations())
            report.request()

        evaluations = Evaluations(
            config, folder=folder, ledger=ledger, fleet=fleet, rows=rows.held_out, line=line, written=written
        )
        saving = Saving(
            config, folder=folder, checkpoints=checkpoints, trainer=trainer, arrays=curriculum.state,
            evaluations=evaluations, ledger=ledger, step=start,
        )  # fmt: skip
        metrics = StepMetrics(
            config, folder=folder, tokenizer=given.tokenizer, line=line, guard=guard, exported=exported
        )

        def serve_fleet() -> None:
            """The fleet's work for the trainer's thread while it waits."""
            parity.attend(saving.step)
            status = fleet.status()
            waits.hold(status["waits_for"])
            line.update(waiting=status["waiting"])
            evaluations.collect()

        def wait() -> None:
            """Called repeatedly while waiting for the fleet. Raises Interrupted: the state is that of `saving.step`."""
            signals.raise_if_interrupted()
            if local is not None:
                local.check()
            serve_fleet()

        remarks = [trainer.attention_note, memory_note, *(local.remarks if local is not None else [])]
        if found is not None:
            remarks.append(f"going on from step {start} of {config.max_steps}")
        now = inputs.digests(config, rows.held_out, rows.train)
        for remark in (*remarks, *setup.remarks_on_changes(folder, now, step=start, fresh=found is None)):
            line.log(remark)

        # ---- 5. The loop ---------------------------------------------------------------------------------------------
        thinks = config.rollout.thinking_budget_max > 0
        end_of_thinking = given.tokenizer.encode(config.rollout.end_of_thinking) if thinks else ()
        with entry.user_mistakes(FleetError, ProbeError, ScorerError, StartError):
            fleet.start()
            # From here on a signal is only noted, and acted on where the state is that of a whole number of steps: it
            # is until a gradient is applied.
            signals.be(signals.HOLD)
            stack.enter_context(saving.when_interrupted(serve_fleet))
            fleet.publish(*trainer.version(start))
            if evaluations.due(start):
                evaluations.ask(start, wait=wait)
            guard.raise_if_collapsed()  # from the rows before a restart
            ledger.begin()
            number = start
            while number < config.max_steps:
                signals.raise_if_interrupted()
                pending = None  # an unapplied gradient is as large as the parameters: released before the next one
                # 1. Wait for the groups of this number, however late.
                try:
                    with waits.waiting():
                        groups = fleet.batch(number, wait=wait)
                except NoPromptLeft as solved:  # config.curriculum.when_empty: the run ends here
                    line.log(f"the run ends after step {number} of {config.max_steps}: {solved}")
                    evaluations.ask(number, wait=wait, last=True)
                    guard.raise_if_collapsed()
                    saving.save_if_due(last=True)
                    break
                # 2. Build the batch; compute its gradient, and the log-probs by which its servers are judged.
                # Completions that are not the policy's are requested again, and then the batch comes again.
                with ledger.trainer("busy"), waits.working():
                    batch = build(groups, config.objective, number=number, end_of_thinking=end_of_thinking)
                    beside = parity.beside(groups, batch)
                    if batch.segments:
                        pending = trainer.forward_backward(
                            batch.segments, beside=beside.segments, before_micro_batch=signals.raise_if_interrupted
                        )
                    logprobs = pending.logprobs() if pending is not None else trainer.score(beside.segments)
                    if not parity.judge(groups, [*batch.origins, *beside.places], logprobs):
                        continue
                    # 3. Update. A batch in which no prompt survives changes nothing, but still makes a version.
                    step, trained = number + 1, {}
                    if pending is not None:
                        trained = off_policy_metrics(batch.segments, logprobs, batch.origins)
                        scale = step_scale(config.optimizer, trained["effective_sample_size_sequence"])
                        rate = scale * learning_rate(config.optimizer, trainer.steps)
                        with guard.update(step):
                            sums = trainer.optim_step(pending, learning_rate=rate)
                        trained |= per_token(sums) | {"step_scale": scale}
                    ledger.trained([len(segment.tokens) for segment in batch.segments])
                    version = trainer.version(step)
                ledger.finished_groups(groups)
                saving.step = number = step
                # 4. What the fleet may draw next depends on these outcomes: recorded before the version is published.
                curriculum.record(step - 1, batch.outcomes)
                fleet.publish(*version)
                fleet.advance(step)
                parity.trained(step)
                # 5. Write the row.
                values = {
                    **trained,
                    **waits.drain(),
                    **parity.drain(),
                    "pushes": sync_stats.drain(),
                    **({"teachers": teachers.drain()} if teachers is not None else {}),
                    "prompts_retired": curriculum.retired(),
                    "optimizer_step": trainer.steps,
                    "compute": ledger.snapshot(),
                    **forecast.collect(),
                }
                metrics.write(step, groups, batch, values, waiting=fleet.waiting())
                # 6. Evaluate, then save: a run that resumes from here would lack the rows of earlier evaluations.
                if evaluations.due(step):
                    evaluations.ask(step, wait=wait)
                saving.wait_if_late(wait)
                guard.raise_if_collapsed()  # a collapsed policy is not saved
                saving.save_if_due()

    # ---- 6. Results --------------------------------------------------------------------------------------------------
    signals.expect("interrupted: the run is finished; the same command shows its results")
    signals.be(signals.EXIT)
    summary.show(FLAGS.workdir)


def run() -> None:
    command_flags.train()
    platforms.cpu_too()  # for the fits
    entry.run_with_config(main)


if __name__ == "__main__":
    run()
