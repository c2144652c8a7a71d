"""scalerl-study: runs a study of several configs, continues it after any end, and writes its results.

    scalerl-study --study=leave_one_out --base=configs/quickstart.py --workdir=runs/study [--seeds=3] [--parallel=N]
                  [--members=a,b] [--config.a.b=v]
    scalerl-study --study=leave_one_out,margin --base=configs/quickstart.py --workdir=runs/study --results_only
    scalerl-study --study=scaling --base=configs/scalerl_8b.py --workdir=runs/scaling --render=slurm --trainer=h200:2x8
                  --generator=h200:1 --generators=16 --insecure

Every member is a scalerl-train in WORKDIR/runs, with the base's config and the flags in which it differs; members that
several studies share run once. If config.model.path does not exist, scalerl-sft makes it first, in WORKDIR/warm-start.
The same command continues after any end: finished members are not run again, failed ones are. At the end it prints a
table and the comparisons with the baseline, and writes study.json, evaluations.csv and study.html in WORKDIR.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from scalerl_jax.cli import entry, study_flags
from scalerl_jax.cli.entry import UserError, user_mistakes
from scalerl_jax.config import Config
from scalerl_jax.config_check import check
from scalerl_jax.config_io import GivenConfig
from scalerl_jax.run.folder import acquire_lock
from scalerl_jax.study import members, running
from scalerl_jax.study.board import FAILED, FINISHED, Board, Task
from scalerl_jax.study.members import Starts, WarmStart, starts
from scalerl_jax.study.plan_file import PlanFile, Standing, standing
from scalerl_jax.study.running import Running
from scalerl_jax.system import files, platforms, signals

CACHE = "JAX_COMPILATION_CACHE_DIR"
_PROGRAMS = {"scalerl-train": "scalerl_jax.train", "scalerl-sft": "scalerl_jax.sft"}


class _StudyRun:
    """One start of the command on its workdir."""

    def __init__(self, given: GivenConfig):
        """Reports every mistake, before any file is written."""
        self.workdir = study_flags.WORKDIR.value
        self.study = members.read(
            given,
            base=study_flags.BASE.value,
            studies=study_flags.STUDIES.value,
            names=study_flags.STUDY.value,
            seeds=study_flags.SEEDS.value,
        )
        self.chosen = self.study.chosen(study_flags.MEMBERS.value)
        if study_flags.BASELINE.value:
            self.study.check_member("baseline", study_flags.BASELINE.value)
        entry.check_out("--workdir", self.workdir)
        self.starts: Starts = starts(self.study, self.workdir)
        for name, config in self.study.runs.items():
            config.model.path = self.starts.models[name]
            check(config)
        self.plan = PlanFile(self.workdir, self.study, self.starts)
        self.standings = {name: self._standing(name) for name in self.study.runs}

    def path(self, *names: str) -> str:
        return os.path.join(self.workdir, *names)

    def _standing(self, name: str) -> Standing:
        return standing(self.path("runs", name), self.study.runs[name], ended=self.plan.ended.get(name))

    def command(self, name: str) -> list[str]:
        """The command of a run, as a user types it."""
        moved = ["--allow=model.path"] if self.standings[name].moved else []
        return self._typed("scalerl-train", self.path("runs", name), self.study.runs[name], *moved)

    def _typed(self, program: str, workdir: str, config: Config, *more: str) -> list[str]:
        flags_of_it = self.study.flags(config)
        return [program, f"--config={self.study.base_path}", f"--workdir={workdir}", *flags_of_it, *more]

    def tasks(self) -> list[Task]:
        """The tasks of the chosen runs, each after the warm start that it needs."""
        made: dict[str, Task] = {}
        out = []
        for name in self.chosen:
            start = self.starts.made.get(name)
            if start is not None and start.name not in made and not self.standings[name].finished:
                made[start.name] = self._warm_start(start)
                out.append(made[start.name])
            task = Task(
                name,
                folder=self.path("runs", name),
                log=self.path("logs", f"{name}.log"),
                steps=self.study.runs[name].max_steps,
                command=lambda name=name: _started(self.command(name)),  # type: ignore[misc]
                needs=made.get(start.name) if start is not None else None,
            )
            task.state = FINISHED if self.standings[name].finished else task.state
            out.append(task)
        return out

    def _warm_start(self, start: WarmStart) -> Task:
        typed = self._typed("scalerl-sft", self.path(start.name), start.config)
        task = Task(
            start.name,
            folder=self.path(start.name),
            log=self.path("logs", f"{start.name}.log"),
            steps=start.config.sft.max_steps,
            command=lambda: _started(typed),
            is_run=False,
        )
        task.state = FINISHED if start.is_made(self.workdir) else task.state
        return task

    def ended(self, task: Task) -> str:
        """Handles a task that ended with exit code 0, by which a trainer reports that nothing is left to do. Returns
        why it failed, or ""."""
        if not task.is_run:
            return ""
        self.standings[task.name] = self._standing(task.name)
        if not self.standings[task.name].finished:
            step = files.newest_step(task.folder)
            if step is None:
                return "ended without a checkpoint"
            self.plan.ended[task.name] = step
            self.plan.save()
            self.standings[task.name] = self._standing(task.name)
        return ""

    # ------------------------------------------------------------------ the command's actions

    def run(self) -> list[Task]:
        """Runs all unfinished tasks; returns the tasks, which have all ended."""
        parallel = study_flags.PARALLEL.value
        environment = dict(os.environ)
        shared = running.shares(parallel, environment)
        environment.setdefault(CACHE, os.path.abspath(self.path("compiled")))
        with files.naming(self.workdir):
            os.makedirs(self.workdir, exist_ok=True)
        lock = acquire_lock(self.path("lock"), f"--workdir={self.workdir}: a study")
        try:
            self.plan.save()
            tasks = self.tasks()
            with Board(tasks, parallel=parallel) as board:
                for line in self.starts.notes:
                    board.log(line)
                done = sum(task.state == FINISHED for task in tasks if task.is_run)
                if done:
                    board.log(f"{done} of {len(self.chosen)} runs are finished already")
                signals.be(signals.HOLD)
                signals.expect("interrupted: what ran has been saved; the same command goes on")
                Running(tasks, shared, environment, board, self.ended).until_all_have_ended()
        finally:
            os.close(lock)
        signals.expect("interrupted: the same command shows the results")
        signals.be(signals.RAISE)
        return tasks

    def launch_files(self, target: str) -> list[str]:
        """Writes what scalerl-launch writes for each chosen run, in WORKDIR/launch/RUN, or nothing if one of them
        cannot be launched; returns the folders. target: of scalerl-launch. Raises UserError."""
        for name in self.chosen:
            if name in self.starts.made:
                raise UserError(
                    f"--render={target}: {name} starts from {self.starts.made[name].name}, which scalerl-sft has yet "
                    f"to make: make it, and name it with --config.model.path"
                )
        workdir = os.path.abspath(self.workdir)
        _define_launch_flags(target)
        from launch import launch_flags, render, rendered  # after the line above: they define the flags

        for flag in (launch_flags.NAME, launch_flags.OUT, launch_flags.WORKDIR):
            if flag.present:
                raise UserError(f"--{flag.name}: is every run's own in a study")
        where, study = os.path.join(workdir, "launch"), render.cluster_name(os.path.basename(workdir))
        made = {}
        for name in self.chosen:
            # On a shared file system the run's folder is in the study's; on Kubernetes it is on the cluster's volume.
            run_folder = {
                "slurm": os.path.join(workdir, "runs", name),
                "kubernetes": f"/runs/{study}/{name}",
            }[target]
            folder = os.path.join(where, name)
            with user_mistakes(before=f"--render={target}: {name}: "):
                made[folder] = render.launch_files(
                    self.study.runs[name], target, name=render.cluster_name(f"{name}-{study}"),
                    workdir=run_folder, folder=folder,
                )  # fmt: skip
                rendered.check_folder(folder)
        for folder, written in made.items():
            with files.naming(where):
                os.makedirs(where, exist_ok=True)
            rendered.write_folder(folder, written)
        return list(made)

    def show_results(self) -> None:
        """Reads every run, prints the results, and writes them."""
        platforms.cpu_here()
        # Imported late, because it is large: reporting a mistake and running members for hours do not need it.
        from scalerl_jax.scaling.commands import terminal
        from scalerl_jax.study import writing
        from scalerl_jax.study.study_results import results

        console = terminal.make_console()
        found = results(self.study, self.path("runs"), x=study_flags.X.value, baseline=study_flags.BASELINE.value)
        if not found.rows:
            raise UserError(f"--workdir={self.workdir}: no run in it has an evaluation yet")
        writing.show(console, found)
        written = writing.write(
            self.workdir,
            self.study,
            found,
            command=shlex.join(["scalerl-study", *sys.argv[1:]]),
            commands={name: shlex.join(self.command(name)) for name in self.study.runs},
            finished=[name for name, one in self.standings.items() if one.finished],
        )
        terminal.print_line(console, f"written: {', '.join(written)}")


def _started(typed: Sequence[str]) -> list[str]:
    """The command as a process with this Python."""
    return [sys.executable, "-m", _PROGRAMS[typed[0]], *typed[1:]]


def _define_launch_flags(target: str) -> None:
    """Replaces the study's flags by those of scalerl-launch, which were given together with them: both have a
    --workdir. Raises UserError where one of them is not a flag."""
    for name in [flag.name for flag in flags.FLAGS.get_flags_for_module(study_flags.__name__)]:
        delattr(flags.FLAGS, name)
    import launch.launch_flags  # noqa: F401

    with user_mistakes(flags.Error):
        left = flags.FLAGS(["scalerl-launch", f"--target={target}", *study_flags.FOR_LAUNCH])
    if left[1:]:
        raise UserError(f"{left[1]}: is no flag")


def main(given: GivenConfig) -> None:
    one = _StudyRun(given)
    if study_flags.RENDER.value:
        print(*one.launch_files(study_flags.RENDER.value), sep="\n")
        return
    tasks = [] if study_flags.RESULTS_ONLY.value else one.run()
    failed = [task for task in tasks if task.state == FAILED]
    if not failed or any(task.state == FINISHED for task in tasks if task.is_run):
        one.show_results()
    for task in failed:
        Console(stderr=True, highlight=False, emoji=False, soft_wrap=True).print(
            f"{task.name}: {task.why}", markup=False
        )
    if failed:
        raise SystemExit(f"error: {len(failed)} of {len(tasks)} failed; the same command tries them again")


def run() -> None:
    study_flags.move_launch_flags(sys.argv)
    entry.run_with_config_later(main)


if __name__ == "__main__":
    run()
