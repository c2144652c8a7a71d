"""The text of --help: the command's docstring, its flags, and every field of the config with its comment.

No module is imported for it: docstrings and comments are read from the source.
"""

import ast
import dataclasses
import importlib.util
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from absl import flags

from scalerl_jax import config as config_lib

WIDTH = 120
_ASKED = ("--help", "-help", "-h", "-?", "--helpshort", "-helpshort")
_PACKAGES = ("scalerl_jax.", "rollout_server.", "launch.")  # absl's own flags stay under --helpfull


def text(module: str, *, config: bool, required: bool = True) -> str:
    """The help of the command in `module`, whose flags are already defined. config: it has --config; required: it
    needs --config."""
    parts = [docstring(module), "flags:", *map(_flag, _own_flags())]
    if config:
        must = " (required)" if required else ""
        parts += [_wrapped("  --config: ", f"Python file whose get_config() returns the run's Config.{must}")]
        parts += ["", "fields of the config, each of them a flag too, as in --config.seed=1:", *_config_fields()]
    return "\n".join(parts) + "\n"


def docstring(module: str) -> str:
    doc = ast.get_docstring(ast.parse(_source(module)))
    assert doc
    return doc + "\n"


def comments(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the field's comment, for every annotated field of one line in the file.

    The comment follows the field, or is on separate lines directly above it.
    """
    found, above, group = {}, list[str](), ""
    for line in _source(module).splitlines():
        if line.startswith("class "):
            group = re.split(r"\W", line)[1]
        if line.startswith("    # "):
            above.append(line.strip("# "))
            continue
        if field := re.match(r"    (\w+): .*?(  # .*)?$", line):
            found[group, field[1]] = " ".join([*above, (field[2] or "").strip("# ")]).strip()
        above = []
    return found


def _source(module: str) -> str:
    # find_spec of the package only: for a module inside it, find_spec would import the package.
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    with open(os.path.join(os.path.dirname(spec.origin), *inside) + ".py", encoding="utf-8") as file:
        return file.read()


def _own_flags() -> Iterator[flags.Flag]:
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith(_PACKAGES):
            yield from defined


def _flag(flag: flags.Flag) -> str:
    if flag.default is None and not all(validator.checker(None) for validator in flag.validators):
        default = "(required)"
    elif flag.default is None or flag.default == "":
        default = ""
    else:
        default = f"(default: {str(flag.default_as_str).strip(chr(39))})"
    return _wrapped(f"  --{'[no]' if flag.boolean else ''}{flag.name}: ", f"{flag.help} {default}".rstrip())


def _config_fields() -> Iterator[str]:
    field_comments = comments(config_lib.__name__)

    def group(name: str, node: Any) -> Iterator[str]:
        fields = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
        plain = [(field, value) for field, value in fields if not dataclasses.is_dataclass(value)]
        plain = [(field, value) for field, value in plain if field != "mixture"]
        hints = get_type_hints(type(node))
        shown = [f"--{name}.{field}={_short(value)}" for field, value in plain]
        width = min(52, max(map(len, shown)))
        yield ""
        for (field, _), start in zip(plain, shown, strict=True):
            choices = " | ".join(get_args(hints[field])) if get_origin(hints[field]) is Literal else ""
            text = "; ".join(filter(None, (choices, field_comments[type(node).__name__, field])))
            yield _wrapped(f"  {start:<{width}}  ", text, indent=width + 4)
        for field, value in fields:
            if dataclasses.is_dataclass(value):
                yield from group(f"{name}.{field}", value)

    yield from group("config", config_lib.Config())
    yield ""
    yield _wrapped(
        "  --config.mixture.NAME.FIELD=...  ",
        "of an environment of config.mixture, which the config file names: the fields of config.environment",
    )


def _short(value: Any) -> str:
    written = str(value).lower() if isinstance(value, bool) else str(value)
    return written if len(written) <= 24 else f'"{written[:20]}..."'


def _wrapped(start: str, body: str, *, indent: int = 6) -> str:
    return textwrap.fill(
        body, WIDTH, initial_indent=start, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def print_if_asked(module: str, *, config: bool, required: bool = True) -> None:
    """Prints the help and ends the process with code 0 if the command line asks for it."""
    if any(item in _ASKED for item in sys.argv[1:]):
        sys.stdout.write(text(module, config=config, required=required))
        sys.stdout.flush()
        raise SystemExit(0)
