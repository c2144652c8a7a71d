"""The config of a scalerl-eval command, made from its flags, a run's folder and the defaults."""

import re

from absl import flags

from scalerl_jax import config_check
from scalerl_jax.cli import entry
from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_io import GivenConfig
from scalerl_jax.environments.load import place_of

FLAGS = flags.FLAGS
# The fields of a run's environment that also apply to other environments that its policy is evaluated on.
_KEPT = (
    *("chat_template", "template_arguments", "history", "system_prompt", "prompt_suffix", "long_prompts", "options"),
    *("minimum_terms", "maximum_terms", "sandbox", "verifier_processes", "verifier_seconds", "verifier_memory_bytes"),
)


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
    if base is not None and values.environment:
        base.mixture = {}
    held_out = base.evaluation.prompts if base is not None else 0
    config = given.config(base)
    if values.model:
        config.model.path = values.model
    if values.samples:
        config.evaluation.samples = values.samples
    if values.environment:
        config.evaluation.prompts = values.prompts or config.evaluation.prompts
        with entry.user_mistakes(before="--environment: "):
            chosen = [environment_of(text, config.environment) for text in values.environment]
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
        config.evaluation.prompts = held_out
    config_check.check(config)
    return config


def environment_of(text: str, base: EnvironmentConfig) -> EnvironmentConfig:
    """The environment that one --environment names. Raises ValueError if it names none.

    base: gives how prompts are rendered and the limits for scoring; the data and rewards are the environment's own.
    """
    name, where = place_of(text)
    return EnvironmentConfig(name=name, validation=where, **{field: getattr(base, field) for field in _KEPT})
