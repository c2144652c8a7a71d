"""What scalerl-plan needs beside the environment, into a folder of its own: the compiler of TPUs, or of GPUs.

    python requirements/plan_packages.py NAME TARGET     those of NAME-pyVERSION.lock into TARGET, for PYTHONPATH

NAME is plan (libtpu) or plan-gpu (JAX's plug-in and CUDA). Not into the environment: where either is installed, every
process that uses JAX looks for the device first. Whole or not at all, and nothing the second time. Needs only Python's
standard library and pip.
"""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def install(name: str, target: pathlib.Path) -> None:
    """Raises subprocess.CalledProcessError where pip cannot; what was there before is then still there."""
    lock = ROOT / "requirements" / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}.lock"
    stamp, wanted = target / "installed", sys.version + "\n" + lock.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print(f"plan-packages: {', '.join(lock.read_text(encoding='utf-8').split())} into {target}", flush=True)
    making = target.with_name(target.name + ".part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, f"--target={making}", f"--requirement={lock}"], check=True)
    (making / "installed").write_text(wanted, encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    making.rename(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("plan-packages: NAME and a TARGET folder are needed")
    try:
        install(sys.argv[1], pathlib.Path(sys.argv[2]).absolute())
    except subprocess.CalledProcessError as error:
        sys.exit(f"plan-packages: {' '.join(error.cmd[1:4])} ... failed, see above; the same command begins again")
