"""The environments of a run by name, each with the config that it would have alone.

A run without a mixture has one part, named "". In a mixture each part is a key of config.mixture; Row.environment
holds the name of the row's part.
"""

import dataclasses
from collections.abc import Collection

from scalerl_jax.config import Config


def configs(config: Config) -> dict[str, Config]:
    """The run's config for each part, with the part's own EnvironmentConfig as config.environment."""
    if not config.mixture:
        return {"": config}
    return {
        name: dataclasses.replace(config, environment=environment, mixture={})
        for name, environment in config.mixture.items()
    }


def common(config: Config, fields: Collection[str]) -> tuple[str, Config]:
    """The name and config of the first part, with which all others agree in these fields of the environment. Raises
    ValueError, which names the first difference."""
    (first, one), *others = configs(config).items()
    for name, other in others:
        for leaf in fields:
            here, there = getattr(one.environment, leaf), getattr(other.environment, leaf)
            if here != there:
                raise ValueError(f"the mixture has {field(first, leaf)}={here!r}, {field(name, leaf)}={there!r}")
    return first, one


def as_written(part: str, line: str) -> str:
    """`line` with the fields of the part's EnvironmentConfig as the user wrote them."""
    return line.replace("config.environment.", f"config.mixture.{part}.") if part else line


def field(part: str, name: str) -> str:
    """The user's name for a field of the part's EnvironmentConfig: "config.mixture.math.reward"."""
    return f"config.mixture.{part}.{name}" if part else f"config.environment.{name}"
