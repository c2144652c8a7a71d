"""Settings of a launch for every target: a config, the machines, and the commands of trainer and generators.

The files of a target are made from these (kubernetes.py, slurm.py). A restart is the same command: scalerl-train
continues the run in its workdir.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from launch.machines import Machine
from launch.starting import serve_flags
from scalerl_jax.config import Config

TRAINER_METRICS_PORT = 9401
EXIT_CODES = {  # of scalerl-train, and of scalerl-serve; names in the templates
    "LEFT_ON_SIGTERM": 143,  # 128 + SIGTERM, as scalerl_jax/system/signals.py ends a command
    "USERS_MISTAKE": 2,  # a wrong flag or file: a restart would fail in the same way
    "COLLAPSED": 3,  # as scalerl_jax/run/collapse_guard.py ends a run, which a person must then check
}
CONNECT_SECONDS = 7200  # that the trainer waits for a generator: they may be queued, pulled or preempted meanwhile
LONGEST_NAME = 40  # characters: with the suffixes added to it, it is still a valid Kubernetes label

# A self-contained config file: the modules that the given one imports are not on the run's machines.
READS_JSON = '''"""The config of this run, as scalerl-launch read it: config.json beside this file."""

import pathlib

from scalerl_jax.config_io import from_json


def get_config():
    return from_json((pathlib.Path(__file__).parent / "config.json").read_text(encoding="utf-8"))
'''

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one launch, for every target."""

    name: str
    config: Config
    part: str  # "all" | "trainer" | "generators"
    workdir: str
    trainer: Machine | None  # None: launched separately
    generator: Machine | None  # machine of one generator; None: launched separately
    generators: int
    engine: str  # "jax" | "vllm"
    servers: str  # value of --servers, where the generators are launched separately
    grace_seconds: int
    max_restarts: int  # of the trainer after failures; preemptions do not count
    insecure: bool
    trainer_env: dict[str, str] = dataclasses.field(default_factory=dict)
    generator_env: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError, one line that names the flag, where a setting is wrong."""
        check_name(self.name)
        if not self.config.model.path:
            raise ValueError("config.model.path: not given: the folder of the policy, where the run will be")
        for name, where in self.config.distill.teachers.items() if self.trainer is not None else ():
            if ":" not in where:  # a folder, for a server on the trainer's own machine
                raise ValueError(
                    f"config.distill.teachers.{name}={where}: is a folder, and a launched run takes servers: launch "
                    f"them with --part=generators --config.model.path={where}, and give their addresses"
                )
        if self.generator is not None:
            self._check_generator(self.generator)

    def _check_generator(self, machine: Machine) -> None:
        if machine.hosts > 1:
            raise ValueError(
                f"--generator={machine.text}: the devices of an engine are on one host; more generators are "
                "--generators=N"
            )
        if self.engine == "jax" and machine.devices_of_host > machine.least:
            raise ValueError(
                f"--generator={machine.text}: the jax engine computes on one device, and the others would be idle; "
                "more generators are --generators=N"
            )
        if self.engine == "vllm" and machine.kind == "tpu":
            raise ValueError(f"--engine=vllm: runs on GPUs and CPUs, not on --generator={machine.text}")
        if self.engine == "vllm" and self.config.numerics != "fast":
            raise ValueError(f"--engine=vllm: config.numerics={self.config.numerics} is computed by jax alone")


def maximum_tokens(config: Config) -> int:
    """Upper bound on the tokens of a prompt and its completion, which the servers must hold; needs no tokenizer.

    The interruption phrase is bounded by its bytes, since each of its tokens has at least one.
    """
    rollout = config.rollout
    thinks = rollout.thinking_budget_max > 0 and rollout.length_control == "interrupt"
    phrase = len(rollout.interruption_text.encode()) if thinks else 0
    completion = rollout.thinking_budget_max + rollout.answer_budget + phrase
    longest = rollout.max_prompt_tokens + (rollout.max_episode_tokens if rollout.max_turns > 1 else completion)
    return min(longest, config.learner.seq_len + 1)


def check_name(name: str) -> None:
    """Raises ValueError where this is no valid name in a cluster."""
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"--name={name}: a name begins with a letter, and lower-case letters, digits and - are possible, "
            f"at most {LONGEST_NAME}"
        )


def pairs(flag: str, items: Sequence[str]) -> dict[str, str]:
    """Parses the NAME=VALUE items of a flag. Raises ValueError that names the flag."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise ValueError(f"--{flag}={','.join(items)}: {item!r} is not NAME=VALUE")
        found[name] = value
    return found


def train_command(
    settings: Settings, *, config: str, model: str, servers: str, hosts: str, metrics_host: str, fleet: dict[str, Any]
) -> list[str]:
    """The command of every host of the trainer.

    Args:
        config: path of the config file on the trainer's hosts.
        model: folder of the policy there.
        servers: value of --servers.
        hosts: value of --hosts (how the hosts find each other); used only with several hosts.
        metrics_host: address that the metrics are served on.
        fleet: fields of config.fleet that the target sets.
    """
    assert settings.trainer is not None
    if settings.config.fleet.connect_seconds == Config().fleet.connect_seconds:  # generators start by themselves, later
        fleet = {**fleet, "connect_seconds": CONNECT_SECONDS}
    return [
        "scalerl-train",
        f"--config={config}",
        f"--workdir={settings.workdir}",
        f"--servers={servers}",
        *([f"--hosts={hosts}"] if hosts else []),
        f"--metrics_port={TRAINER_METRICS_PORT}",
        f"--metrics_host={metrics_host}",
        f"--config.model.path={model}",
        *(f"--config.fleet.{name}={value}" for name, value in fleet.items()),
    ]


def generator_command(settings: Settings, *, model: str, port: int, access: Sequence[str]) -> list[str]:
    """The command of one generator without its metrics flags. access: the flags that say who may call it."""
    assert settings.generator is not None
    config_flags = serve_flags(
        settings.config, engine=settings.engine, model=model, maximum_tokens=maximum_tokens(settings.config)
    )
    split = settings.engine == "vllm" and settings.generator.devices_of_host > 1
    parallel = [f"--tensor_parallel={settings.generator.devices_of_host}"] if split else []
    return ["scalerl-serve", *config_flags, *parallel, "--host=0.0.0.0", f"--port={port}", *access]
