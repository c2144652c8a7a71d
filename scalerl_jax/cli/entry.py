"""Runs a command's main: reads flags, turns a user's mistake into one line, exits with a code."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from absl import app, flags, logging

from scalerl_jax import config_io
from scalerl_jax.cli import command_help
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError
from scalerl_jax.config_io import GivenConfig, parse_argv, read_argv
from scalerl_jax.system import ending, files, signals

Given = TypeVar("Given")  # the config, or its flags


class UserError(ValueError):
    """A user's mistake outside the config: a folder, a file, an address. The message is one line."""


def run_command(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a command without a config file, and ends the process; main gets the arguments that are not flags.

    A UserError or ConfigError is printed as one line; exit code 2.
    """
    command_help.print_if_asked(_module_of(main), config=False)
    _run(main, sys.argv[1:])


def run_with_config(main: Callable[[Config], None]) -> NoReturn:
    """Reads --config=FILE and its overrides, then the absl flags, then runs `main(config)`."""
    config, rest = _read(main, parse_argv, required=True)
    _run(without_arguments(lambda: main(config)), rest)


def run_with_arguments(main: Callable[[Config, list[str]], None], *, default: Config) -> NoReturn:
    """The same for a command with arguments that are not flags; without --config its config is `default`."""
    config, rest = _read(main, lambda argv: parse_argv(argv, default=default), required=False)
    _run(lambda arguments: main(config, arguments), rest)


def run_with_config_later(main: Callable[[GivenConfig], None]) -> NoReturn:
    """The same for a command that finds its config itself without --config: main gets the config's flags as given."""
    given, rest = _read(main, read_argv, required=False)
    _run(without_arguments(lambda: main(given)), rest)


def without_arguments(main: Callable[[], None]) -> Callable[[list[str]], None]:
    """A main for arguments that are not flags, which refuses any."""

    def run(arguments: list[str]) -> None:
        if arguments:
            raise UserError(f"{arguments[0]}: is no flag: those begin with two hyphens, and nothing else is taken here")
        main()

    return run


def answer_at_once(
    module: str, *, config: bool, default: Config | None = None, later: bool = False
) -> tuple[Config | GivenConfig, list[str]] | None:
    """Prints help, and reports mistakes in flags and config, without the command's own imports.

    module: the command's module, which defines the same flags when it runs. default: the config without --config, if it
    is optional. later: without --config only the command itself can find its config. Ends the process, or returns the
    config (a GivenConfig with `later`, Config() for a command without one) and the arguments that are not flags.
    Returns None for --helpfull and --helpxml.
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
    """Runs a check before the command's own imports; ends the process where it finds a mistake."""

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
    """The config of a run folder. Raises UserError naming --workdir where this is no run folder or its config cannot be
    read."""
    path = os.path.join(workdir, "config.json")
    if not os.path.isfile(path):
        raise UserError(f"--workdir={workdir}: no config.json there, so it is not the folder of a run")
    with open(path, "rb") as file, user_mistakes(before=f"--workdir={workdir}: "):
        return config_io.from_json(file.read().decode(errors="replace"))


def check_out(name: str, path: str) -> None:
    """Raises UserError where `path` cannot be written to, before any work is done.

    name: the flag that gave the path. Folders of the path need not exist yet.
    """
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if folder != os.path.abspath(path) and not os.path.isdir(folder):
        raise UserError(f"{name}={path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{name}={path}: {folder} cannot be written to")


def prepare_out(name: str, path: str) -> None:
    """As check_out, of a file, whose folder is made."""
    check_out(name, path)
    if not path or os.path.isdir(path):
        raise UserError(f"{name}={path}: is {'a folder' if path else 'empty'}")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(2)


def _read(
    main: Callable[..., None], read: Callable[[list[str]], tuple[Given, list[str]]], *, required: bool
) -> tuple[Given, list[str]]:
    """The config, by `read`, and the other arguments. Prints the help if it is asked for. required: --config is."""
    command_help.print_if_asked(_module_of(main), config=True, required=required)
    try:
        return read(sys.argv[1:])
    except ConfigError as error:
        fail(str(error))


def _run(main: Callable[[list[str]], None], arguments: list[str]) -> NoReturn:
    """Runs main with the arguments left after the flags were read, and ends the process."""
    argv = [sys.argv[0], *arguments]
    ending.run(lambda: app.run(lambda rest: _guarded(lambda: main(rest[1:])), argv=argv, flags_parser=_parse))


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        fail(" ".join(str(error).split()))
    for name in flags.FLAGS:  # NaN is within any bounds
        value = flags.FLAGS[name].value
        if isinstance(value, float) and math.isnan(value):
            fail(f"--{name}=nan: is not a number")
    return rest


def _module_of(main: Callable[..., None]) -> str:
    """The import name of main's module, even if it is the script that was started."""
    module = sys.modules[main.__module__]
    return module.__spec__.name if module.__spec__ is not None else module.__name__


def _guarded(main: Callable[[], None]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax logs much at INFO; --verbosity=0 shows it
    with signals.installed():
        try:
            main()
        except (UserError, ConfigError) as error:
            signals.wait_if_exiting()
            fail(str(error))
        except OSError as error:
            if error.filename is None or error.errno is None:  # a bug, not a file's fault
                raise
            fail(f"{error.filename}: {files.reason(error)}")
        except signals.Interrupted as stop:  # all open resources are closed by now
            signals.wait_if_exiting()
            sys.stderr.write(f"{stop.line}\n")
            raise SystemExit(128 + stop.number) from None


@contextlib.contextmanager
def user_mistakes(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Wraps code that reads a user's input: errors of these kinds (by default ValueError) become a UserError.

    before: prefix of the message.
    """
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        raise UserError(f"{before}{error}") from error
