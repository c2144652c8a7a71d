"""The commands. --help, wrong flags and wrong configs are answered without heavy imports; then the module runs.

Commands that compute run with a tuned malloc:

    glibc.malloc.hugetlb=1     XLA on a CPU allocates and frees every result and every temporary with malloc, and the
                               kernel clears each page every time. With pages of 2 MiB that is a fraction of the work.
    glibc.malloc.arena_max=N   One arena a core, not eight. Free memory of one arena cannot be used by the threads of
                               another: with eight, a trainer of many threads holds a fifth more memory, and longer.

glibc (2.35 or newer) reads GLIBC_TUNABLES once, at the start of a process. So a command without these re-executes
itself before anything large is imported; its children inherit the variable. If the user has set either, it is kept.

Left out on purpose: `python -m` starts the modules as they are.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping

from scalerl_jax import early_checks
from scalerl_jax.cli import command_flags, entry, plan_flags
from scalerl_jax.config import Config
from scalerl_jax.system import signals

OLDEST_GLIBC = (2, 35)
CURVES = "scalerl_jax.scaling.commands"


def with_tuned_malloc(environment: Mapping[str, str], *, glibc: str, cores: int) -> dict[str, str] | None:
    """The environment in which malloc is tuned, or None if nothing has to change.

    glibc: the system's name of its C library, such as "glibc 2.36"; other libraries have no such settings.
    """
    name, _, version = glibc.partition(" ")
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < OLDEST_GLIBC:
        return None
    chosen = environment.get("GLIBC_TUNABLES", "")
    ours = {"glibc.malloc.hugetlb": 1, "glibc.malloc.arena_max": cores}
    missing = [f"{tunable}={value}" for tunable, value in ours.items() if tunable not in chosen]
    if not missing:
        return None
    return {**environment, "GLIBC_TUNABLES": ":".join(filter(None, [chosen, *missing]))}


def restart_with_tuned_malloc() -> None:
    """Re-executes this process with a tuned malloc, and then never returns; returns if nothing has to change."""
    if sys.platform == "linux" and "CS_GNU_LIBC_VERSION" in os.confstr_names:
        glibc = os.confstr("CS_GNU_LIBC_VERSION") or ""
        environment = with_tuned_malloc(os.environ, glibc=glibc, cores=os.cpu_count() or 1)
        if environment is not None:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _run(
    module: str,
    define: Callable[[], None],
    *,
    config: bool = False,
    default: Config | None = None,
    later: bool = False,
    tuned: bool = False,
    check: early_checks.Check | None = None,
) -> None:
    """Answers what needs no imports, then imports and runs the module of one command.

    define: defines the command's flags. config: the command has --config. default: its config without --config.
    later: without --config only the command itself can find its config. tuned: malloc is tuned.
    check: checks the arguments before the command is imported.
    """
    define()
    asked = entry.answer_at_once(module, config=config, default=default, later=later)
    if tuned:
        restart_with_tuned_malloc()
    if asked is not None and check is not None:
        entry.check_early(functools.partial(check, *asked))
    with signals.installed():  # an interrupted import can end in any error of the imported module
        signals.expect("interrupted")
        signals.be(signals.EXIT)
        command = importlib.import_module(module)
    command.run()


def _importing(*modules: str) -> Callable[[], None]:
    """A function that imports these modules, which define flags when imported."""

    def define() -> None:
        for module in modules:
            importlib.import_module(module)

    return define


def train() -> None:
    _run("scalerl_jax.train", command_flags.train, config=True, tuned=True, check=early_checks.train)


def sft() -> None:
    _run("scalerl_jax.sft", command_flags.sft, config=True, tuned=True, check=early_checks.sft)


def serve() -> None:
    _run("rollout_server.serve", _importing("rollout_server.serve_flags"), tuned=True)


def fit() -> None:
    def define() -> None:
        _importing("scalerl_jax.cli.fit_flags")()
        command_flags.watch()

    _run(f"{CURVES}.scalerl_fit", define, check=early_checks.curves("fit", parts_too=True))


def compare() -> None:
    define = _importing("scalerl_jax.cli.fit_flags", "scalerl_jax.cli.compare_flags")
    _run(f"{CURVES}.scalerl_compare", define, check=early_checks.curves("compare"))


def calibrate() -> None:
    define = _importing("scalerl_jax.cli.fit_flags")
    _run(f"{CURVES}.scalerl_calibrate", define, check=early_checks.curves("calibrate"))


def verify() -> None:
    _run("scalerl_jax.verify", command_flags.verify, config=True, default=Config())


def evaluate() -> None:
    define = command_flags.evaluate
    _run("scalerl_jax.evaluate", define, config=True, later=True, tuned=True, check=early_checks.evaluate)


def gateway() -> None:
    define = command_flags.gateway
    _run("scalerl_jax.gateway.command", define, config=True, default=Config(), check=early_checks.gateway)


def tinker() -> None:
    define = command_flags.tinker
    _run("scalerl_jax.tinker.command", define, config=True, default=Config(), tuned=True, check=early_checks.gateway)


def export() -> None:
    _run("scalerl_jax.export", command_flags.export)


def plan() -> None:
    _run("scalerl_jax.plan", plan_flags.define, config=True, later=True, check=early_checks.plan)


def study() -> None:
    def define() -> None:
        from scalerl_jax.cli import study_flags

        study_flags.move_launch_flags(sys.argv)

    _run("scalerl_jax.study.command", define, config=True, later=True, tuned=True)


def launch() -> None:
    _run("launch.render", _importing("launch.launch_flags"), config=True, later=True)


def report() -> None:
    _run("scalerl_jax.report.command", command_flags.report)
