r"""scalerl-launch: writes the files that run a config on a cluster, and applies them.

    scalerl-launch --target=kubernetes --config=configs/scalerl_8b.py --trainer=v5p:4x4x4 --generator=h100:1 \
        --generators=64 --trainer_image=IMAGE --generator_image=IMAGE --dry_run
    scalerl-launch --target=slurm --config=configs/scalerl_8b.py --trainer=h200:2x8 --generator=h200:1 --generators=16 \
        --token_file=F --tls_certificate=F --tls_key=F --tls_authority=F --dry_run

The files are written whole into --out. Without --dry_run, apply.sh (kubectl) or submit.sh (sbatch) among them is then
run. Flags from --trainer_image to --prometheus are for kubernetes, from --partition to --tls_name for slurm. Every
field of the config is a flag too, as in --config.model.path=models/mine. docs/how_to/kubernetes.md describes a launch
step by step.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

from absl import flags

from launch import kubernetes, launch_flags, machines, rendered, slurm
from launch.settings import LONGEST_NAME, Settings, check_name, pairs
from scalerl_jax.cli import entry
from scalerl_jax.config import Config
from scalerl_jax.config_io import GivenConfig

# Target -> the program that applies the files, the script among them, and where to get the program.
_APPLY = {
    "kubernetes": ("kubectl", "apply.sh", "kubernetes.io/docs/tasks/tools says how to install it"),
    "slurm": ("sbatch", "submit.sh", "it is on the login nodes of a Slurm cluster"),
}
# Target -> its own settings; every field has the name of its flag.
_SETTINGS: dict[str, type] = {"kubernetes": kubernetes.Cluster, "slurm": slurm.Queue}
# --part -> flags that only the other part reads, by how their names begin.
_OTHER_PARTS = {
    "trainer": re.compile("generator|engine|autoscale|maximum_gen|busy_|prometheus|issuer|tls_certificate|tls_key"),
    "generators": re.compile("trainer|slices|grace_|max_restarts|runs_claim|storage_size|tls_name"),
}


def _flag(name: str) -> Any:
    return getattr(launch_flags, name.upper())


def _value(name: str) -> Any:
    return _flag(name).value


def _check_read(target: str, part: str) -> None:
    """Raises ValueError where a flag is given that nothing of this launch reads."""
    own = {field.name for field in dataclasses.fields(_SETTINGS[target])}
    for other, kind in _SETTINGS.items():
        for field in dataclasses.fields(kind):
            if field.name not in own and _flag(field.name).present:
                raise ValueError(f"--{field.name}: requires --target={other}")
    given = [flag for flag in vars(launch_flags).values() if isinstance(flag, flags.FlagHolder) and flag.present]
    for flag in given if part in _OTHER_PARTS else ():
        if flag.value and _OTHER_PARTS[part].match(flag.name):
            raise ValueError(f"--{flag.name}: does not go with --part={part}")
    if launch_flags.PROMETHEUS.present and launch_flags.AUTOSCALE.value != "keda":
        raise ValueError("--prometheus: requires --autoscale=keda")
    for volume, claim in ((launch_flags.STORAGE_SIZE, "runs_claim"), (launch_flags.MODELS_SIZE, "models_claim")):
        if volume.present and _value(claim):
            raise ValueError(f"--{volume.name}={volume.value}: --{claim}={_value(claim)} is there already")


def _machine(flag: str, *, wanted: bool) -> machines.Machine | None:
    text = _value(flag)
    if wanted and not text:
        raise ValueError(f"--{flag}: not given")
    return machines.of_flag(flag, text) if text else None


def _settings(config: Config, target: str, *, name: str, workdir: str) -> Settings:
    """workdir: the run's folder; "" derives it from the run's name. Raises ValueError, one line that names the flag."""
    part = launch_flags.PART.value
    _check_read(target, part)
    check_name(name)
    generator = _machine("generator", wanted=part != "trainer")
    servers = launch_flags.SERVERS.value
    if bool(servers) != (part == "trainer"):
        raise ValueError(
            f"--servers{f'={servers}' * bool(servers)}: requires --part=trainer, and that requires --servers"
        )
    on_gpus = generator is not None and generator.kind == "gpu" and config.numerics == "fast"
    default = {"kubernetes": f"/runs/{name}", "slurm": os.path.abspath(f"runs/{name}")}[target]
    workdir = workdir or default
    if target == "kubernetes" and not workdir.startswith("/runs/"):
        raise ValueError(f"--workdir={workdir}: is not under /runs, where the volume is")
    return Settings(
        name=name,
        config=config,
        part=part,
        workdir=workdir if target == "kubernetes" else os.path.abspath(workdir),
        trainer=_machine("trainer", wanted=part != "generators"),
        generator=generator,
        generators=launch_flags.GENERATORS.value,
        engine=launch_flags.ENGINE.value or ("vllm" if on_gpus else "jax"),
        servers=servers,
        grace_seconds=launch_flags.GRACE.value,
        max_restarts=launch_flags.MAX_RESTARTS.value,
        insecure=launch_flags.INSECURE.value,
        trainer_env=pairs("trainer_env", launch_flags.TRAINER_ENV.value),
        generator_env=pairs("generator_env", launch_flags.GENERATOR_ENV.value),
    )


def _from_flags(kind: type, **more: Any) -> Any:
    """An instance of Cluster or Queue; each field not in `more` has the value of the flag of the same name."""
    fields = [field.name for field in dataclasses.fields(kind)]
    values = {name: _value(name) for name in fields if name not in more}
    return kind(**more, **{name: pairs(name, v) if isinstance(v, list) else v for name, v in values.items()})


def launch_files(config: Config, target: str, *, name: str, workdir: str, folder: str) -> list[rendered.RenderedFile]:
    """The files that launch one run, for the folder they will be in; all other settings come from the flags.

    Raises ValueError, one line that names the flag.
    """
    return _files(_settings(config, target, name=name, workdir=workdir), target, folder)


def cluster_name(text: str) -> str:
    """The valid cluster name nearest to `text`; a long one ends with a digest of it."""
    name = re.sub("[^a-z0-9-]", "-", text.lower())
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def _files(settings: Settings, target: str, folder: str) -> list[rendered.RenderedFile]:
    for flag in ("token_file", "tls_authority", "tls_certificate", "tls_key"):
        if (path := _value(flag)) and not os.path.isfile(path):
            raise ValueError(f"--{flag}={path}: no such file")
    if target == "kubernetes":
        return kubernetes.render(settings, _from_flags(kubernetes.Cluster, **_absolute("token_file", "tls_authority")))
    paths = _absolute("token_file", "tls_authority", "tls_certificate", "tls_key")
    options = {flag: tuple(_value(flag)) for flag in ("trainer_sbatch", "generator_sbatch")}
    return slurm.render(settings, _from_flags(slurm.Queue, **paths, **options), folder=os.path.abspath(folder))


def _absolute(*flags: str) -> dict[str, str]:
    """The values of flags that are paths, made absolute because the scripts run in another folder."""
    return {flag: os.path.abspath(_value(flag)) if _value(flag) else "" for flag in flags}


def main(given: GivenConfig) -> None:
    target = launch_flags.TARGET.value
    if not given.path:
        raise entry.UserError("--config: no config file given, for example --config=configs/scalerl_8b.py")
    config = given.config()
    name = launch_flags.NAME.value or cluster_name(pathlib.Path(given.path).stem)
    folder = launch_flags.OUT.value or f"{name}-{target}"
    with entry.user_mistakes():
        files = launch_files(config, target, name=name, workdir=launch_flags.WORKDIR.value, folder=folder)
    with entry.user_mistakes(before="--out="):
        rendered.check_folder(folder)
    program, script, where = _APPLY[target]
    dry = launch_flags.DRY_RUN.value
    if not dry and shutil.which(program) is None:
        raise entry.UserError(f"--target={target}: no {program} is here ({where}); --dry_run only writes the files")
    rendered.write_folder(folder, files)
    width = max(len(file.name) for file in files)
    for file in files:
        print(f"{os.path.join(folder, file.name):<{len(folder) + 1 + width}}  {file.summary}")
    command = ["bash", os.path.join(folder, script)]
    if dry:
        print(f"to apply them: {shlex.join(command)}", flush=True)
        return
    code = subprocess.run(command, check=False).returncode
    if code:
        raise entry.UserError(f"--target={target}: {shlex.join(command)} ended with code {code}, see above")


def run() -> None:
    entry.run_with_config_later(main)


if __name__ == "__main__":
    run()
