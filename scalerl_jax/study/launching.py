"""The launch files of every run of a study, in WORKDIR/launch/RUN: what scalerl-launch writes for each.

The flags of scalerl-launch are given together with the study's. They become flags of this process here, when the
study's are no longer needed: both have a --workdir.
"""

import os
from collections.abc import Sequence

from absl import flags

from scalerl_jax.cli import study_flags
from scalerl_jax.cli.entry import UserError, user_mistakes
from scalerl_jax.study.members import Study
from scalerl_jax.study.warm_start import Starts
from scalerl_jax.system import files

FOLDER = "launch"


def launch_all(
    study: Study, starts: Starts, chosen: Sequence[str], *, workdir: str, target: str, given: Sequence[str]
) -> list[str]:
    """Writes the files of all these runs, or none if one of them cannot be launched; returns the folders.

    given: the flags of scalerl-launch. Raises UserError.
    """
    for name in chosen:
        if name in starts.made:
            raise UserError(
                f"--render={target}: {name} starts from {starts.made[name].name}, which scalerl-sft has yet to make: "
                f"make it, and name it with --config.model.path"
            )
    workdir = os.path.abspath(workdir)
    _define(target, given)
    from launch import launch_flags, rendered  # after _define: they define the flags
    from launch.render import cluster_name, launch_files

    for flag in (launch_flags.NAME, launch_flags.OUT, launch_flags.WORKDIR):
        if flag.present:
            raise UserError(f"--{flag.name}: is every run's own in a study")
    where = os.path.join(workdir, FOLDER)
    made = {}
    for name in chosen:
        # On a shared file system the run's folder is in the study's; on Kubernetes it is on the cluster's volume.
        run_folder = {
            "slurm": os.path.join(workdir, "runs", name),
            "kubernetes": f"/runs/{cluster_name(os.path.basename(workdir))}/{name}",
        }[target]
        folder = os.path.join(where, name)
        with user_mistakes(before=f"--render={target}: {name}: "):
            made[folder] = launch_files(
                study.runs[name], target, name=cluster_name(name), workdir=run_folder, folder=folder
            )
            rendered.check_folder(folder)
    for folder, written in made.items():
        with files.naming(where):
            os.makedirs(where, exist_ok=True)
        rendered.write_folder(folder, written)
    return list(made)


def _define(target: str, given: Sequence[str]) -> None:
    """Replaces the study's flags by those of scalerl-launch. Raises UserError where one of `given` is not a flag."""
    for name in [flag.name for flag in flags.FLAGS.get_flags_for_module(study_flags.__name__)]:
        delattr(flags.FLAGS, name)
    import launch.launch_flags  # noqa: F401

    with user_mistakes(flags.Error):
        left = flags.FLAGS(["scalerl-launch", f"--target={target}", *given])
    if left[1:]:
        raise UserError(f"{left[1]}: is no flag")
