"""The config as a file, as flags, and as the config.json of a run."""

import dataclasses
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.config_check import check, check_types, saved_leaves
from scalerl_jax.config_names import RENAMED, REPLACED, ConfigError, no_field

_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def load_file(path: str) -> Config:
    """The config that a file's get_config() returns. Raises ConfigError naming the file and the field."""
    if not os.path.isfile(path):
        raise ConfigError(f"--config={path}: no such file")
    spec = importlib.util.spec_from_file_location("scalerl_config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except ConfigError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        why = _no_field(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"--config={path}: {why}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"--config={path}: get_config() returns {type(config).__name__}, not a Config")
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"--config={path}: {error}") from None
    return config


def _no_field(error: Exception) -> str:
    """The line on a field of a config's group that is none, read or given; "": it is another error."""
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
    if f"config.{path}" in RENAMED:
        raise ConfigError(f"--config.{path}: was renamed to --{RENAMED[f'config.{path}']}")
    try:
        group, name = _place(config, path)
    except ConfigError as error:
        raise ConfigError(f"--config.{path}: {error}") from None
    # Of the default: where a file gives a float field an integer, the value that stands there has another type.
    kind = type(getattr(type(group)(), name))
    if dataclasses.is_dataclass(kind):
        raise ConfigError(f"--config.{path}: is a group of fields, not a value")
    setattr(group, name, _convert(f"--config.{path}", kind, text))


def _place(config: Config, path: str) -> tuple[Any, str]:
    """The group that has the field `path`, and the field's name in it. Raises ConfigError where there is no such."""
    group: Any = None
    node, where, parts = config, "config", path.split(".")
    for part in parts:
        names = [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
        if part not in names:
            raise ConfigError(no_field(where, part, names))
        group, node, where = node, getattr(node, part), f"{where}.{part}"
    return group, parts[-1]


def _convert(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        lowered = text.lower()
        if lowered not in ("true", "false", "1", "0"):
            raise ConfigError(f"{name}={text}: is not true or false")
        return lowered in ("true", "1")
    if kind is str:
        return text
    try:
        if kind is int:
            return int(text.replace("_", ""))
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: is not a number of type {kind.__name__}") from None


def parse_argv(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """Reads --config=FILE and every --config.a.b=value out of argv; returns the config and the other arguments.

    Raises ConfigError on a missing or unreadable file, an unknown field, or a value of the wrong type.
    """
    path, overrides, rest = None, [], []
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
    if path is None:
        raise ConfigError("--config: no config file given, for example --config=configs/quickstart.py")
    config = load_file(path)
    for key, text in overrides:
        override(config, key, text)
    check(config)
    return config, rest


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Config:
    """The inverse of to_json. Raises ConfigError on text that is no JSON, unknown fields and values of another type."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json: is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config={values!r}: is not of type Config")
    config = Config()
    for path, value in saved_leaves(values).items():
        if f"config.{path}" not in REPLACED:  # a run that was begun before goes on
            group, name = _place(config, path)
            setattr(group, name, value)
    check_types(config, Config(), "config")
    return config
