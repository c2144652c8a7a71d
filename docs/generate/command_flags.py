"""The flags of one command, as JSON: a process of its own for each, since absl's flags are one process' alone.

    python -m docs.generate.command_flags train

The name is that of the function in launch/commands.py, which is asked for what it would run.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from launch import commands
from scalerl_jax.cli import command_help
from scalerl_jax.config import Config


def described(command: str) -> dict[str, Any]:
    """Module, docstring, whether it takes --config ("", "required", "optional"), and its flags in order."""
    found: dict[str, Any] = {}

    def note(
        module: str,
        define: Callable[[], None],
        *,
        config: bool = False,
        default: Config | None = None,
        later: bool = False,
        **_: object,
    ) -> None:
        define()
        must = "required" if default is None and not later else "optional"
        found.update(module=module, docstring=command_help.docstring(module), config=must if config else "")

    commands._run = note
    getattr(commands, command)()
    return {**found, "flags": [_flag(flag) for flag in command_help._own_flags()]}


def _flag(flag: flags.Flag) -> dict[str, Any]:
    parser = flag.parser
    return {
        "name": flag.name,
        "type": flag.flag_type(),
        "choices": [choice for choice in getattr(parser, "enum_values", None) or () if choice],
        "low": getattr(parser, "lower_bound", None),
        "high": getattr(parser, "upper_bound", None),
        "default": None if flag.default in (None, "", []) else str(flag.default_as_str).strip("'"),
        "required": flag.default is None and not all(validator.checker(None) for validator in flag.validators),
        "help": re.sub(r"^<[^>]*>: ", "", flag.help),  # absl puts the choices there
    }


if __name__ == "__main__":
    print(json.dumps(described(sys.argv[1])))
