"""The config as a file, as flags, and as the config.json of a run."""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import os
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_check import ConfigError, check, check_types, leaves, no_field, saved_leaves

_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def load_file(path: str) -> Config:
    """The config that a file's get_config() returns. Raises ConfigError naming the file and the field."""
    with naming_user_code(f"--config={path}"):
        config = load_module(path, f"--config={path}").get_config()
    if not isinstance(config, Config):
        raise ConfigError(f"--config={path}: get_config() returns {type(config).__name__}, not a Config")
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"--config={path}: {error}") from None
    return config


def load_module(path: str, given: str) -> types.ModuleType:
    """The module of a user's Python file. given: the beginning of a ConfigError if the file is not one.

    Exceptions of its code are passed on, see naming_user_code.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{given}: no such file")
    spec = importlib.util.spec_from_file_location("scalerl_config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{given}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def naming_user_code(given: str) -> Iterator[None]:
    """Wraps user code, which may raise anything: the exception becomes a ConfigError that begins with `given`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why = _no_field(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{given}: {why}") from error


def _no_field(error: Exception) -> str:
    """The message for a field that a group of the config lacks, read or passed; "" for another error."""
    groups = {type(getattr(Config(), field.name)): f"config.{field.name}" for field in dataclasses.fields(Config)}
    groups[Config] = "config"
    if isinstance(error, AttributeError):
        kind, name = type(error.obj), str(error.name)
    elif isinstance(error, TypeError) and (found := _UNEXPECTED.match(str(error))):
        kind, name = {kind.__name__: kind for kind in groups}.get(found[1], type(None)), found[2]
    else:
        return ""
    if kind not in groups or not dataclasses.is_dataclass(kind):
        return ""
    return no_field(groups[kind], name, [field.name for field in dataclasses.fields(kind)])


def override(config: Config, path: str, text: str) -> None:
    """Sets the leaf `path` ("objective.max_ratio") from a flag's text. Raises ConfigError naming the flag."""
    try:
        group, name = _place(config, path)
    except ConfigError as error:
        raise ConfigError(f"--config.{path}: {error}") from None
    # The default's type: if a file sets a float field to an integer, the current value has another type.
    kind = type(group[name]) if isinstance(group, dict) else type(getattr(type(group)(), name))
    if dataclasses.is_dataclass(kind) or (group is config and name == "mixture"):
        raise ConfigError(f"--config.{path}: is a group of fields, not a value")
    setattr(group, name, _convert(f"--config.{path}", kind, text))


def _place(config: Config, path: str) -> tuple[Any, str]:
    """The group that has the field `path`, and the field's name in it. Raises ConfigError if there is none."""
    group: Any = None
    node, where, parts = config, "config", path.split(".")
    for part in parts:
        fields: dict[str, Any] = {}
        if dataclasses.is_dataclass(node):
            fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        elif node is config.mixture:
            fields = config.mixture
        if part not in fields:
            raise ConfigError(no_field(where, part, list(fields)))
        group, node, where = node, fields[part], f"{where}.{part}"
    return group, parts[-1]


def _convert(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{name}={text}: is not true or false")
        return _BOOLS[text.lower()]
    if kind is str:
        return text
    if kind is dict:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"{name}={text}: is not a JSON object, as in {name}='{{\"enable_thinking\": false}}'")
        return found
    try:
        if kind is int:
            return int(text.replace("_", ""))
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: is not a number of type {kind.__name__}") from None


def as_flags(config: Config, base: Config) -> list[str]:
    """The flags --config.a.b=v that make `base` into `config`, for every leaf that differs; override reads them back.

    Raises ConfigError if no flag can: one of them has an environment in its mixture that the other lacks.
    """
    before, after = leaves(base), leaves(config)
    if apart := sorted(before.keys() ^ after.keys()):
        raise ConfigError(f"config.{apart[0]}: is not in both configs, and a flag adds no environment to a mixture")
    return [f"--config.{name}={_text(after[name])}" for name in after if before[name] != after[name]]


def _text(value: Any) -> str:
    """The inverse of _convert."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    return repr(value) if isinstance(value, float) else str(value)


def parse_argv(argv: Sequence[str], *, default: Config | None = None) -> tuple[Config, list[str]]:
    """Reads --config=FILE and every --config.a.b=value out of argv; returns the config and the other arguments.

    default: the config if no file is given; None: a file is required.

    Raises ConfigError on a missing or unreadable file, an unknown field, or a value of the wrong type.
    """
    given, rest = read_argv(argv)
    if not given.path and default is None:
        raise ConfigError("--config: no config file given, for example --config=configs/quickstart.py")
    return given.config(copy.deepcopy(default)), rest


@dataclasses.dataclass(frozen=True)
class GivenConfig:
    """The config flags of a command line."""

    path: str  # of the config file; "": none
    overrides: tuple[tuple[str, str], ...]  # (dotted name, text), in order

    def config(self, base: Config | None = None) -> Config:
        """The file's config, or `base` (None: the defaults) without a file, with the overrides. `base` is changed.

        Raises ConfigError as parse_argv does.
        """
        config = load_file(self.path) if self.path else base or Config()
        for name, text in self.overrides:
            override(config, name, text)
        check(config)
        return config


def read_argv(argv: Sequence[str]) -> tuple[GivenConfig, list[str]]:
    """The config's flags, and the other arguments. Raises ConfigError if a flag has no value."""
    path, overrides, rest = "", [], []
    items = iter(argv)
    for item in items:
        flag, equals, text = item.partition("=")
        key = flag.removeprefix("-").removeprefix("-")
        if not flag.startswith("-") or (key != "config" and not key.startswith("config.")):
            rest.append(item)
            continue
        if not equals:
            following = next(items, None)
            if following is None:
                raise ConfigError(f"--{key}: no value given")
            text = following
        if key == "config":
            path = text
        else:
            overrides.append((key.removeprefix("config."), text))
    return GivenConfig(path, tuple(overrides)), rest


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Config:
    """The inverse of to_json. Raises ConfigError if text is not JSON, has unknown fields or values of another type."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json: is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config={values!r}: is not of type Config")
    config = Config()
    mixture = values.get("mixture")
    if isinstance(mixture, dict):
        config.mixture = {name: EnvironmentConfig() for name in mixture}
    for path, value in saved_leaves(values).items():
        group, name = _place(config, path)
        setattr(group, name, value)
    check_types(config, Config(), "config")
    return config
