"""Launch target slurm: a config becomes two batch scripts, and submit.sh, which submits them.

    config.py, config.json   the config, whole
    generators.sbatch        a job array, each element one generator: it takes a free port, writes its address into
                             addresses/, and is queued again when it is preempted or its time is up
    trainer.sbatch           every host the same scalerl-train under srun; it watches the file `servers`, which is
                             rebuilt from addresses/ whenever a generator comes or goes
    submit.sh                submits both

addresses/, servers and logs/ are in WORKDIR-launch. This folder, the workdir and all files named have to be on a file
system that all nodes see. SIGTERM before the time limit (--signal) or at a preemption
makes the trainer save and leave, with exit code 143; the script then puts the job in the queue again, and the same
command goes on from there. It does so after failures too, --max_restarts times; a user's mistake (code 2) ends the job,
and so does a policy that has collapsed (code 3, checkpoint.on_collapse).
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence

from launch.rendered import RenderedFile, comment
from launch.settings import (
    COLLAPSED,
    LEFT_ON_SIGTERM,
    READS_JSON,
    USERS_MISTAKE,
    Settings,
    generator_command,
    train_command,
)
from scalerl_jax import config_io

_GENERATOR_GRACE_SECONDS = 60  # before the time limit: what it samples is asked of others, nothing is to be saved
# The number alone may be that of the whole array.
_ELEMENT = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
_LOCK_SECONDS = 60  # that a generator waits for the others while it writes down where it is

_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=[^\n]+)?")
# Options that the scripts have themselves: the flag that they go by (PART: trainer or generator); "": none.
_OURS = {
    "job-name": "name", "partition": "partition", "account": "account", "time": "time", "nodes": "PART",
    "gpus-per-node": "PART", "array": "generators", "mem": "PART_memory", "cpus-per-task": "PART_cpus",
    **dict.fromkeys(("output", "open-mode", "ntasks-per-node", "ntasks", "exclusive", "requeue", "signal"), ""),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Queue:
    """What only Slurm needs to be told; see launch_flags.py."""

    folder: str  # absolute: where the files will be
    partition: str = ""
    generator_partition: str = ""
    account: str = ""
    time: str = "24:00:00"
    trainer_cpus: int = 0
    trainer_memory: str = "0"
    generator_cpus: int = 0
    generator_memory: str = ""
    trainer_sbatch: tuple[str, ...] = ()
    generator_sbatch: tuple[str, ...] = ()
    setup: str = ""
    generator_setup: str = ""
    token_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    tls_name: str = ""

    def check(self, settings: Settings) -> None:
        """Raises ValueError, one line that names the flag."""
        for part, machine in (("trainer", settings.trainer), ("generator", settings.generator)):
            if machine is not None and machine.kind == "tpu":
                raise ValueError(f"--{part}={machine.text}: TPUs are in Kubernetes clusters; with slurm GPUs or cpu")
        files = {"token_file": self.token_file, "tls_authority": self.tls_authority}
        if settings.generator is not None:
            files |= {"tls_certificate": self.tls_certificate, "tls_key": self.tls_key}
        for flag, path in files.items():
            if settings.insecure and path:
                raise ValueError(f"--{flag}={path}: does not go with --insecure")
            if not settings.insecure and not path:
                raise ValueError(
                    f"--{flag}: not given; without TLS and a token, where every client on the network may replace "
                    "the weights: --insecure"
                )
        for flag in ("trainer_memory", "generator_memory"):
            if (value := getattr(self, flag)) and not re.fullmatch(r"\d+[KMGT]?", value):
                raise ValueError(f"--{flag}={value}: is not written like 512G")
        for flag in ("trainer_sbatch", "generator_sbatch"):
            for option in getattr(self, flag):
                _check_option(flag, option)


def _check_option(flag: str, option: str) -> None:
    """Raises ValueError where it is none, or one that the scripts rely on."""
    found = _OPTION.fullmatch(option)
    if found is None:
        raise ValueError(f"--{flag}={option}: is no option of sbatch, written like --{flag}=--qos=long")
    if (name := found["name"]) in _OURS:
        by = _OURS[name].replace("PART", flag.removesuffix("_sbatch"))
        why = f"goes by --{by}" if by else "is the script's own"
        raise ValueError(f"--{flag}={option}: --{name} {why}")


def render(settings: Settings, queue: Queue) -> list[RenderedFile]:
    """The files of a launch. Raises ValueError that names the flag where it cannot be."""
    queue.check(settings)
    made = []
    if settings.generator is not None:
        made.append(_generators(settings, queue))
    if settings.trainer is not None:
        made += [*_config(settings), _trainer(settings, queue)]
    scripts = [file.name for file in made if file.name.endswith(".sbatch")]
    return [*made, _submit(settings, queue, scripts)]


def _config(settings: Settings) -> list[RenderedFile]:
    return [
        RenderedFile("config.py", "The config of the run: reads config.json.", READS_JSON),
        RenderedFile("config.json", "The config, whole.", config_io.to_json(settings.config)),
    ]


def _state(settings: Settings) -> str:
    """Where the jobs write down where they are and what they say: it outlives the files here."""
    return f"{settings.workdir}-launch"


def _head(options: Sequence[str], says: str, setup: str, then: str) -> list[str]:
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), comment(says).rstrip()]
    lines += ["set -euo pipefail", then, ""]
    return [*lines, *([setup, ""] if setup else [])]


def _where(queue: Queue, part: str) -> list[str]:
    """What of the cluster a job gets, the site's own options last. part: "trainer" | "generator"."""
    trainer = part == "trainer"
    cpus = queue.trainer_cpus if trainer else queue.generator_cpus
    found = {
        "cpus-per-task": str(cpus or ""),
        "mem": queue.trainer_memory if trainer else queue.generator_memory,
        "partition": queue.partition if trainer else queue.generator_partition or queue.partition,
        "account": queue.account,
        "time": queue.time,
    }
    own = queue.trainer_sbatch if trainer else queue.generator_sbatch
    return [*(f"--{name}={value}" for name, value in found.items() if value), *own]


def _again(condition: str, says: str, *, job: str = "$SLURM_JOB_ID") -> list[str]:
    """Puts the job in the queue again, unless it is cancelled, or Slurm does so by itself (a preemption)."""
    return [
        f'state=$(scontrol --oneliner show job "{job}")',
        f'if {condition} && [[ "$state" == *JobState=RUNNING* ]]; then',
        f'    echo "{says}: queued again" >&2',
        f'    scontrol requeue "{job}"',
        "fi",
    ]


def _trainer(settings: Settings, queue: Queue) -> RenderedFile:
    machine = settings.trainer
    assert machine is not None
    options = [
        f"--job-name={settings.name}-trainer",
        f"--output={_state(settings)}/logs/trainer-%j.log",
        "--open-mode=append",
        f"--nodes={machine.hosts}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={machine.devices_of_host}"] if machine.devices_of_host else []),
        "--exclusive",
        "--requeue",
        f"--signal=TERM@{settings.grace_seconds}",
        *_where(queue, "trainer"),
    ]
    fleet = {}
    if not settings.insecure:
        fleet = {"tls_authority": queue.tls_authority, "token_file": queue.token_file}
        fleet |= {"tls_name": queue.tls_name} if queue.tls_name else {}
    command = train_command(
        settings,
        config=f"{queue.folder}/config.py",
        model=os.path.abspath(settings.config.model.path),
        servers=settings.servers or f"file:{_state(settings)}/servers",
        hosts="slurm" if machine.hosts > 1 else "",
        metrics_host="127.0.0.1",
        fleet=fleet,
    )
    says = f"""Trainer of {settings.name} on {machine.text}: {machine.hosts} nodes, each with the same command.

    Slurm sends SIGTERM {settings.grace_seconds} s before the time limit, and at a preemption: the trainer saves and
    leaves, and the job is queued again."""
    export = [f"export {name}={shlex.quote(value)}" for name, value in settings.trainer_env.items()]
    cpus = f" --cpus-per-task={queue.trainer_cpus}" if queue.trainer_cpus else ""  # srun does not take over sbatch's
    lines = [
        *_head(options, says, queue.setup, "trap 'echo \"SIGTERM: the trainer is saving\" >&2' TERM"),
        *export,
        *_wait_for_servers(settings),
        "code=0",
        f"srun --wait={settings.grace_seconds}{cpus} {_broken(command)} || code=$?",
        "# Slurm's own count has preemptions and time limits in it.",
        f'failures={shlex.quote(_state(settings))}/failures-"$SLURM_JOB_ID"',
        'failed=$(cat "$failures" 2>/dev/null || echo 0)',
        "again=0",
        'case "$code" in',
        f"    0 | {USERS_MISTAKE} | {COLLAPSED}) ;;",
        f"    {LEFT_ON_SIGTERM}) again=1 ;;",
        "    *)",
        f"        if ((failed < {settings.max_restarts})); then",
        "            again=1",
        '            echo "$((failed + 1))" >"$failures"',
        "        fi",
        "        ;;",
        "esac",
        *_again("((again))", "the trainer ended with code $code"),
        'exit "$code"',
    ]
    return RenderedFile("trainer.sbatch", "Batch script of the trainer.", "\n".join(lines) + "\n", executable=True)


def _wait_for_servers(settings: Settings) -> list[str]:
    if settings.servers:
        return []
    servers = shlex.quote(f"{_state(settings)}/servers")
    return [
        "# The first generator may still be in the queue, and scalerl-train wants one; --time bounds this wait too.",
        f"until [[ -s {servers} ]]; do",
        "    sleep 10",
        "done",
    ]


def _generators(settings: Settings, queue: Queue) -> RenderedFile:
    machine = settings.generator
    assert machine is not None
    folder, most = shlex.quote(_state(settings)), settings.generators - 1
    options = [
        f"--job-name={settings.name}-generator",
        f"--output={_state(settings)}/logs/generator-%A-%a.log",
        "--open-mode=append",
        f"--array=0-{most}",
        "--nodes=1",
        "--ntasks=1",
        *([f"--gpus-per-node={machine.devices_of_host}"] if machine.devices_of_host else []),
        "--requeue",
        f"--signal=B:TERM@{_GENERATOR_GRACE_SECONDS}",
        *_where(queue, "generator"),
    ]
    access = ["--insecure"]
    if not settings.insecure:
        access = [
            f"--tls_certificate={queue.tls_certificate}",
            f"--tls_key={queue.tls_key}",
            f"--token_file={queue.token_file}",
        ]
    command = generator_command(settings, model=os.path.abspath(settings.config.model.path), port=0, access=access)
    export = [f"export {name}={shlex.quote(value)}" for name, value in settings.generator_env.items()]
    says = f"""Generators of {settings.name}: {settings.engine} on {machine.text}, an element of the array each.

    Slurm sends SIGTERM {_GENERATOR_GRACE_SECONDS} s before the time limit, and at a preemption: the server ends, what
    it was sampling is asked of the others, and the element is queued again."""
    lines = [
        *_head(options, says, queue.generator_setup or queue.setup, f"cd {folder}"),
        *export,
        "mkdir -p addresses",
        'own="addresses/$SLURM_ARRAY_TASK_ID"',
        'port_file=$(mktemp --dry-run "${TMPDIR:-/tmp}/scalerl-port-XXXXXX")',
        "",
        "# The trainer watches `servers`: a generator that comes or goes rewrites it, one at a time, and whole.",
        "list_servers() {",
        "    (",
        f"        flock --wait {_LOCK_SECONDS} 9",
        '        cat addresses/* >"servers.$SLURM_ARRAY_TASK_ID" 2>/dev/null || true',
        '        mv "servers.$SLURM_ARRAY_TASK_ID" servers',
        "    ) 9>addresses.lock",
        "}",
        "",
        f'{_broken(command)} \\\n    --port_file="$port_file" &',
        "server=$! stopped=0",
        "trap 'stopped=1; kill -TERM \"$server\" 2>/dev/null || true' TERM",
        'while [[ ! -s "$port_file" ]] && kill -0 "$server" 2>/dev/null; do',
        "    sleep 1",
        "done",
        'if [[ -s "$port_file" ]]; then',
        '    echo "$(hostname):$(cat "$port_file")" >"$own"',
        "    list_servers",
        "fi",
        "code=0",
        'wait "$server" || code=$?',
        "# A signal ends the first wait, not the server.",
        'while kill -0 "$server" 2>/dev/null; do',
        '    wait "$server" || code=$?',
        "done",
        'rm -f "$own" "$port_file"',
        "list_servers",
        f"((stopped)) && code={LEFT_ON_SIGTERM}",
        *_again(f"((code != 0 && code != {USERS_MISTAKE}))", "the generator ended with code $code", job=_ELEMENT),
        'exit "$code"',
    ]
    return RenderedFile(
        "generators.sbatch", "Batch script of the generators.", "\n".join(lines) + "\n", executable=True
    )


def _submit(settings: Settings, queue: Queue, scripts: Sequence[str]) -> RenderedFile:
    lines = [
        "#!/usr/bin/env bash",
        comment(f"Submits the jobs of {settings.name}.").rstrip(),
        "set -euo pipefail",
        f"cd {shlex.quote(queue.folder)}",
        f"mkdir -p {shlex.quote(_state(settings))}/logs",
        *(f"sbatch {script}" for script in scripts),
    ]
    return RenderedFile("submit.sh", "Submits the jobs.", "\n".join(lines) + "\n", executable=True)


def _broken(command: Sequence[str]) -> str:
    """A command of one flag a line."""
    return " \\\n    ".join(shlex.quote(os.fspath(part)) for part in command)
