"""What every command does around its main: read flags, turn a user's mistake into one line, leave with a code."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags, logging

from scalerl_jax import signals
from scalerl_jax.config import Config, ConfigError, parse_argv


class UserError(ValueError):
    """A mistake of the user's that is no config field: a folder, a file, an address. The message is one line."""


def run(main: Callable[[], None]) -> None:
    """Runs a command without a config file. A UserError or ConfigError is printed as one line; exit code 2."""
    _describe(main)
    app.run(lambda _: _guarded(main), flags_parser=_parse)


def run_with_arguments(main: Callable[[list[str]], None]) -> None:
    """The same, for a command whose arguments that are no flags are its input."""
    _describe(main)
    app.run(lambda argv: _guarded(lambda: main(argv[1:])), flags_parser=_parse)


def run_with_config(main: Callable[[Config], None]) -> None:
    """Reads --config=FILE and its overrides, then the absl flags, then runs `main(config)`."""
    _describe(main)
    if any(item in ("--help", "-h", "--helpfull", "-help") for item in sys.argv[1:]):
        app.run(lambda _: None)
    try:
        config, rest = parse_argv(sys.argv[1:])
    except ConfigError as error:
        fail(str(error))
    app.run(lambda _: _guarded(lambda: main(config)), argv=[sys.argv[0], *rest], flags_parser=_parse)


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(2)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        fail(" ".join(str(error).split()))


def _describe(main: Callable[..., None]) -> None:
    """Lets --help say what the command is and list its flags: absl looks for both in the script that was started."""
    doc = sys.modules[main.__module__].__doc__ or ""
    sys.modules["__main__"].__doc__ = "\n" + doc.replace("%", "%%")
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("scalerl_jax."):
            for flag in defined:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def _guarded(main: Callable[[], None]) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells its life at INFO; --verbosity=0 brings it back
    with signals.installed():
        try:
            main()
        except (UserError, ConfigError) as error:
            signals.wait_if_leaving()
            fail(str(error))
        except signals.Interrupted as stop:  # everything that was open is closed by now
            signals.wait_if_leaving()
            sys.stderr.write(f"{stop.line}\n")
            raise SystemExit(128 + stop.number) from None


@contextlib.contextmanager
def user_mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """Around code that reads what the user gave: errors of these kinds (none: ValueError) become a UserError."""
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        raise UserError(str(error)) from error
