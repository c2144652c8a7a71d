"""Checks of the folders and files given to a command, made before the command's own imports, which take seconds.

The command repeats these checks; what was read for them is kept for it. Nothing here imports jax.
Left to the command: whatever is a user's code, which may need what the command sets up first.
"""

import os
from collections.abc import Callable, Sequence

from absl import flags

from scalerl_jax.cli import entry
from scalerl_jax.config import Config
from scalerl_jax.config_io import GivenConfig

Check = Callable[[Config | GivenConfig, Sequence[str]], None]  # of the config, or of its flags; other arguments


def train(config: Config | GivenConfig, _: Sequence[str]) -> None:
    """A finished run is shown without its data; on several hosts only the first one has them."""
    from scalerl_jax.hosts import rank
    from scalerl_jax.model.decoder_config import check_folder, read_config
    from scalerl_jax.run import inputs

    assert isinstance(config, Config)
    values = flags.FLAGS
    finished = os.path.isdir(os.path.join(values.workdir, "checkpoints", str(config.max_steps)))
    if finished or _users_code(config):
        return
    host = rank.find(values.hosts, coordinator=values.coordinator, count=values.host_count, index=values.host_index)
    if host is not None and not host.first:
        return
    check_folder("config.model.path", config.model.path)
    read_config(config.model.path)
    inputs.preload(config)


def sft(config: Config | GivenConfig, _: Sequence[str]) -> None:
    from scalerl_jax.environments.data import row_files, sources

    assert isinstance(config, Config)
    for source in sources.parse(config.sft.traces, "config.sft.traces"):
        if source.hub is None:
            row_files.files_of(source.where, source.field)


def evaluate(given: Config | GivenConfig, _: Sequence[str]) -> None:
    from scalerl_jax.model.decoder_config import check_folder, read_config
    from scalerl_jax.run import inputs
    from scalerl_jax.run.evaluation_request import asked

    assert isinstance(given, GivenConfig)
    config, values = asked(given), flags.FLAGS
    check_folder("--model" if values.model else "config.model.path", config.model.path)
    if not os.path.exists(os.path.join(config.model.path, "config.json")):
        read_config(config.model.path)  # raises the error for it; a family unknown here may be known to an engine
    if not _users_code(config):
        inputs.preload(config, held_out=True, apart=bool(values.environment))


def gateway(_: Config | GivenConfig, __: Sequence[str]) -> None:
    from scalerl_jax.environments.tokenizer import Tokenizer
    from scalerl_jax.model.decoder_config import check_folder

    check_folder("--model", flags.FLAGS.model)
    Tokenizer(flags.FLAGS.model)


def plan(given: Config | GivenConfig, _: Sequence[str]) -> None:
    from scalerl_jax.cli import plan_flags
    from scalerl_jax.planning import workload

    assert isinstance(given, GivenConfig)
    if not given.path:
        raise entry.UserError("--config: no config file given, for example --config=configs/scalerl_8b.py")
    if not plan_flags.TOPOLOGY.value:
        raise entry.UserError("--topology: no machine given, for example --topology=v5p:4x4x4")
    with entry.user_mistakes():
        workload.find_machine(plan_flags.TOPOLOGY.value, plan_flags.SLICES.value)
        if generator := plan_flags.GENERATOR.value:
            workload.find_machine(generator, 1, flag="generator")
        config, model_config = given.config(), plan_flags.MODEL_CONFIG.value
        workload.find_decoder(config, config_file=given.path, model_config=model_config)


def curves(name: str, *, parts_too: bool = False) -> Check:
    """The check of scalerl-NAME, which reads evaluations."""

    def check(_: object, paths: Sequence[str]) -> None:
        from scalerl_jax.scaling.commands import reading

        if not ("watch" in flags.FLAGS and flags.FLAGS.watch):  # files may be there later
            reading.preload(paths, name, parts_too=parts_too)

    return check


def _users_code(config: Config) -> bool:
    from scalerl_jax.environments import parts, user_code

    each = [part.environment for part in parts.configs(config).values()]
    return any(user_code.named(text) for one in each for text in (one.name, one.reward, *one.rewards))
