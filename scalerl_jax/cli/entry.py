"""What every command does around its main: read flags, turn a user's mistake into one line, leave with a code."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags, logging

from scalerl_jax import config_io
from scalerl_jax.cli import command_help
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError
from scalerl_jax.config_io import GivenConfig, parse_argv, read_argv
from scalerl_jax.system import ending, files, signals


class UserError(ValueError):
    """A mistake of the user's that is no config field: a folder, a file, an address. The message is one line."""


def run_command(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a command without a config file, and ends the process; main gets the arguments that are no flags.

    A UserError or ConfigError is printed as one line; exit code 2.
    """
    command_help.print_if_asked(_module_of(main), config=False)
    _run(lambda argv: main(argv[1:]), sys.argv)


def run_with_config(main: Callable[[Config], None]) -> NoReturn:
    """Reads --config=FILE and its overrides, then the absl flags, then runs `main(config)`."""
    command_help.print_if_asked(_module_of(main), config=True)
    try:
        config, rest = parse_argv(sys.argv[1:])
    except ConfigError as error:
        fail(str(error))
    _run(lambda _: main(config), [sys.argv[0], *rest])


def run_with_arguments(main: Callable[[Config, list[str]], None], *, default: Config) -> NoReturn:
    """The same for a command with arguments that are no flags, which does without --config: then it is `default`."""
    command_help.print_if_asked(_module_of(main), config=True, required=False)
    try:
        config, rest = parse_argv(sys.argv[1:], default=default)
    except ConfigError as error:
        fail(str(error))
    _run(lambda argv: main(config, argv[1:]), [sys.argv[0], *rest])


def run_with_config_later(main: Callable[[GivenConfig], None]) -> NoReturn:
    """The same for a command whose config without --config it finds itself: it gets what is said of the config."""
    command_help.print_if_asked(_module_of(main), config=True, required=False)
    try:
        given, rest = read_argv(sys.argv[1:])
    except ConfigError as error:
        fail(str(error))
    _run(lambda _: main(given), [sys.argv[0], *rest])


def answer_at_once(
    module: str, *, config: bool, default: Config | None = None, later: bool = False
) -> tuple[Config | GivenConfig, list[str]] | None:
    """What needs nothing of the command's own imports: its help, and what is wrong with its flags and its config.

    module: the command's, which defines the same flags when it runs. default: the config of a command that does without
    --config; later: it is known to the command alone. Ends the process, or returns the config (of a command that has it
    later what is said of it, of one that has none Config()) and the arguments that are no flags; None: help is asked.
    """
    command_help.print_if_asked(module, config=config, required=default is None and not later)
    rest, parsed = sys.argv[1:], Config()
    if "--helpfull" in rest or "--helpxml" in rest:
        return None
    if not config:
        return parsed, _parse([sys.argv[0], *rest])[1:]
    try:
        given, others = read_argv(rest)
        if given.path or not later:
            parsed, _ = parse_argv(rest, default=default)
    except ConfigError as error:
        fail(str(error))
    return given if later else parsed, _parse([sys.argv[0], *others])[1:]


def check_early(check: Callable[[], None]) -> None:
    """Runs what finds mistakes before the command's own imports; ends the process where it finds one."""

    def run_check() -> None:
        signals.expect("interrupted")
        signals.be(signals.EXIT)
        with user_mistakes():
            check()

    try:
        _guarded(run_check)
    except SystemExit as system_exit:
        ending.end(ending.code_of(system_exit))


def config_of_run(workdir: str) -> Config:
    """The config in a run folder. Raises UserError naming --workdir where it is none, or its config cannot be read."""
    path = os.path.join(workdir, "config.json")
    if not os.path.isfile(path):
        raise UserError(f"--workdir={workdir}: no config.json there, so it is not the folder of a run")
    with open(path, "rb") as file, user_mistakes(before=f"--workdir={workdir}: "):
        return config_io.from_json(file.read().decode(errors="replace"))


def check_out(name: str, path: str) -> None:
    """Raises UserError where nothing can be written at `path`, so that it is known before the work is done.

    name: of the flag that gave the path, whose folders may still have to be made.
    """
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if folder != os.path.abspath(path) and not os.path.isdir(folder):
        raise UserError(f"{name}={path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{name}={path}: {folder} cannot be written to")


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(2)


def _run(main: Callable[[list[str]], None], argv: list[str]) -> NoReturn:
    """Runs it with what is left of the arguments when the flags are read, and ends the process."""
    ending.run(lambda: app.run(lambda rest: _guarded(lambda: main(rest)), argv=argv, flags_parser=_parse))


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        fail(" ".join(str(error).split()))


def _module_of(main: Callable[..., None]) -> str:
    """The name it is imported by, also where it is the script that was started."""
    module = sys.modules[main.__module__]
    return module.__spec__.name if module.__spec__ is not None else module.__name__


def _guarded(main: Callable[[], None]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells its life at INFO; --verbosity=0 brings it back
    with signals.installed():
        try:
            main()
        except (UserError, ConfigError) as error:
            signals.wait_if_exiting()
            fail(str(error))
        except OSError as error:
            if error.filename is None or error.errno is None:  # a fault of ours, not of a file's
                raise
            fail(f"{error.filename}: {files.reason(error)}")
        except signals.Interrupted as stop:  # everything that was open is closed by now
            signals.wait_if_exiting()
            sys.stderr.write(f"{stop.line}\n")
            raise SystemExit(128 + stop.number) from None


@contextlib.contextmanager
def user_mistakes(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Around code that reads what the user gave: errors of these kinds (none: ValueError) become a UserError.

    before: what their line begins with.
    """
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        raise UserError(f"{before}{error}") from error
