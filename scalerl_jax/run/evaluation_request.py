"""The config of a scalerl-eval command, made from its flags, a run's folder and the defaults."""

import dataclasses
import re
from collections.abc import Iterable

from absl import flags

from scalerl_jax import config_check
from scalerl_jax.cli import entry
from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_io import GivenConfig, load_file, override
from scalerl_jax.environments import parts
from scalerl_jax.environments.load import place_of

FLAGS = flags.FLAGS
# The fields of a run's environment that also apply to other environments that its policy is evaluated on.
_KEPT = (
    *("chat_template", "template_arguments", "history", "system_prompt", "prompt_suffix", "long_prompts", "options"),
    *("minimum_terms", "maximum_terms", "sandbox", "verifier_processes", "verifier_seconds", "verifier_memory_bytes"),
    *("correct_at", "reward_seconds", "tool_characters", "turn_seconds", "episode_seconds", "agents"),
)
_GROUP = "environment."  # the names of overrides that apply to each environment
_CHOSEN = ("name", "validation")  # fields that --environment gives


def asked(given: GivenConfig) -> Config:
    """The config that the flags ask for. Raises UserError or ConfigError."""
    values = FLAGS
    if bool(values.model) == bool(values.workdir):
        raise entry.UserError("--model or --workdir: one of them says what is evaluated")
    if values.model and values["steps"].present:
        raise entry.UserError(f"--steps={values.steps}: requires --workdir, whose checkpoints they are")
    base = None
    if values.workdir:
        base = entry.config_of_run(values.workdir)
    elif not given.path and not values.environment:
        raise entry.UserError("--environment: says what to evaluate on, where there is no --config and no --workdir")
    held_out = base.evaluation.prompts if base is not None else 0
    start = load_file(given.path) if given.path else base or Config()
    if values.environment and start.mixture:
        start.environment, start.mixture = asked_alike(start, given), {}
    config = dataclasses.replace(given, path="").config(start)
    if values.model:
        config.model.path = values.model
    if values.samples:
        config.evaluation.samples = values.samples
    if values.environment:
        config.evaluation.prompts = values.prompts or config.evaluation.prompts
        with entry.user_mistakes(before="--environment: "):
            overrides = [pair for pair in given.overrides if pair[0].startswith(_GROUP)]
            chosen = [environment_of(text, config.environment, overrides) for text in values.environment]
        if len(chosen) == 1:
            config.environment, config.mixture = chosen[0], {}
        else:
            names = [re.sub(r"\W+", "_", text).strip("_") for text in values.environment]
            names = [name if name.isidentifier() else f"rows_{name}" for name in names]
            config.mixture = {
                f"{name}_{at}" if names.count(name) > 1 else name: environment
                for at, (name, environment) in enumerate(zip(names, chosen), 1)
            }
            config.environment = EnvironmentConfig()
    else:
        # The run decides how many prompts are held out: with more, some would be prompts that it was trained on.
        held_out = held_out or config.evaluation.prompts
        if max(values.prompts, config.evaluation.prompts) > held_out:
            most = max(values.prompts, config.evaluation.prompts)
            raise entry.UserError(f"--prompts={most}: {held_out} are held out, and the others are trained on")
        if (fewer := config.evaluation.prompts) < held_out:
            raise entry.UserError(
                f"config.evaluation.prompts={fewer}: the run holds {held_out} out; --prompts={fewer} takes as many"
            )
        config.evaluation.prompts = held_out
    config_check.check(config)
    return config


def asked_alike(config: Config, given: GivenConfig) -> EnvironmentConfig:
    """The environment of a mixture from which others take the fields of _KEPT. Raises UserError if its environments
    differ in one that is not given."""
    names = {name for name, _ in given.overrides}
    try:
        _, first = parts.common(config, [field for field in _KEPT if f"environment.{field}" not in names])
    except ValueError as error:
        raise entry.UserError(
            f"--environment: how its prompts are asked and scored is not clear, since {error}; "
            "--config.environment.FIELD=... says it"
        ) from None
    return first.environment


def environment_of(text: str, base: EnvironmentConfig, overrides: Iterable[tuple[str, str]]) -> EnvironmentConfig:
    """The environment that one --environment names. Raises ValueError if it names none.

    base: gives how prompts are rendered and the limits for scoring; the data and rewards are the environment's own.
    overrides: (dotted name below the config, text) of fields that are given for it.
    """
    name, where = place_of(text)
    kept = {field: getattr(base, field) for field in _KEPT}
    config = Config(environment=EnvironmentConfig(name=name, validation=where, **kept))
    for path, value in overrides:
        if path.removeprefix(_GROUP) in _CHOSEN:
            raise ValueError(
                f"{text} says what is evaluated, and --config.{path}={value} says it too: give one of them"
            )
        override(config, path, value)
    return config.environment
