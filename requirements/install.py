"""Makes the project's environments from lock files: `make setup`, `make test` and others call this.

    python requirements/install.py --venv=.venv --set=train        what a run needs
    python requirements/install.py --venv=.venv --set=test         and what the tests need on top
    python requirements/install.py --venv=.venv-vllm --set=vllm    vLLM on a CPU and its tests: no jax, another folder
    python requirements/install.py --venv=.venv-adapters --set=adapters   other libraries' environments and their test
    python requirements/install.py --venv=.venv-tinker --set=tinker   programs for Tinker's public client

Needs only Python's standard library. The steps, in this order:
1. Nothing is done where the stamp in the environment names the same locks, setup.py, Python and folder.
2. The environment is made. One whose last installation was broken off is made afresh (a package may lie there in part);
   the downloads of the attempt before are still in the installer's cache.
3. The locked packages are installed by uv, or by pip where uv cannot be had or SETUP_INSTALLER=pip asks for it (about
   eight times slower).
4. torch (not in the train set) is installed by pip, because pip's own configuration is where a user or a machine says
   which build of torch to take. Without a word there, Linux gets the one with CUDA libraries, several GB: --no_torch
   leaves it out of the test set, and the tests that compare with torch skip themselves.
5. Packages that are locked with a hash are installed by pip, which checks it. They are installed as they are: what they
   would bring is in the lock, less what does harm (vLLM's torchvision is a build for CUDA).
6. The project itself is installed in editable mode, and the stamp is written.
"""

import argparse
import fcntl
import hashlib
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Each set with those it holds, at the same versions.
SETS = {
    "train": ("train",),
    "test": ("train", "test"),
    "vllm": ("vllm",),
    "adapters": ("adapters",),
    "tinker": ("tinker",),
}


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def python_of(venv: pathlib.Path) -> pathlib.Path:
    return venv / "bin" / "python"


def lock_of(name: str) -> pathlib.Path:
    return ROOT / "requirements" / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}.lock"


def digest_of(venv: pathlib.Path, name: str, with_torch: bool) -> str:
    """What an environment with set `name` was made from; it goes stale when any of it changes."""
    parts = [str(venv), str(ROOT), sys.version, str(name == "test" and with_torch)]
    files = [*map(lock_of, SETS[name]), ROOT / "setup.py", pathlib.Path(__file__)]
    parts += [path.read_text(encoding="utf-8") for path in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def stamp_of(venv: pathlib.Path, name: str) -> pathlib.Path:
    return venv / f".installed-{name}"


def is_installed(venv: pathlib.Path, name: str, with_torch: bool) -> bool:
    """True where set `name`, or one that holds it, was installed whole from today's files."""
    if broken_off(venv).exists():
        return False
    for larger in [other for other, held in SETS.items() if name in held]:
        stamp = stamp_of(venv, larger)
        if stamp.is_file():
            choices = [True] if larger == name and with_torch else [True, False]
            if stamp.read_text(encoding="utf-8") in [digest_of(venv, larger, choice) for choice in choices]:
                return True
    return False


def broken_off(venv: pathlib.Path) -> pathlib.Path:
    """Lies in the environment from the first change until everything is in."""
    return venv / ".installing"


def make_environment(venv: pathlib.Path) -> None:
    """Makes the environment where there is none, or none that can be gone on with."""
    working = python_of(venv).exists() and not broken_off(venv).exists()
    if working:
        # An environment made by hand counts, too, if it is of this Python and its pip is whole (RECORD comes last).
        program = "import sys; from importlib import metadata; assert metadata.distribution('pip').read_text('RECORD');"
        program += " print(sys.version)"
        probe = [str(python_of(venv)), "-c", program]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        working = answer.returncode == 0
        if working and answer.stdout.strip() != sys.version.strip():
            found, wanted = answer.stdout.split()[0], sys.version.split()[0]
            sys.exit(f"setup: {venv} is of Python {found}, not {wanted}: remove it, or name another with VENV=...")
    if not working:
        say(f"making {venv} with Python {sys.version.split()[0]}")
        base = getattr(sys, "_base_executable", sys.executable)  # not the environment's own, which is about to go
        subprocess.run([base, "-m", "venv", "--clear", venv], check=True)
    broken_off(venv).touch()


def pins(lock: pathlib.Path) -> dict[str, str]:
    """Package -> requirement line."""
    lines = [line.strip() for line in lock.read_text(encoding="utf-8").splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def pip(venv: pathlib.Path, *arguments: str) -> list[str]:
    return [str(python_of(venv)), "-m", "pip", "install", "--disable-pip-version-check", *quiet(), *arguments]


def quiet() -> list[str]:
    """Progress bars are for a person to look at."""
    return [] if sys.stderr.isatty() else ["--quiet"]


def installer(venv: pathlib.Path) -> list[str]:
    """The command that installs: uv's, or pip's where uv is not to be had for this machine or not wanted."""
    uv, wanted = venv / "bin" / "uv", pins(lock_of("test"))["uv"]
    if os.environ.get("SETUP_INSTALLER", "uv") == "uv":
        if not runs(uv, wanted):
            subprocess.run(pip(venv, wanted), check=False)
        if runs(uv, wanted):
            return [str(uv), "pip", "install", "--python", str(python_of(venv)), *quiet()]
        say("uv is not to be had: pip installs, which takes longer")
    return pip(venv)


def runs(uv: pathlib.Path, wanted: str) -> bool:
    """True where that very version of uv is there and works on this machine."""
    if not uv.exists():
        return False
    answer = subprocess.run([str(uv), "--version"], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.split()[1] == wanted.partition("==")[2]


def install(venv: pathlib.Path, name: str, with_torch: bool) -> None:
    locked = pins(lock_of(name))
    torch = locked.pop("torch", None)
    hashed = [locked.pop(package) for package, line in list(locked.items()) if "--hash=" in line]
    # No resolving: the lock is the whole closure.
    requirements = venv / ".installing"
    requirements.write_text("".join(f"{line}\n" for line in locked.values()), encoding="utf-8")
    say(f"installing {len(locked)} packages from {lock_of(name).relative_to(ROOT)}")
    command = installer(venv)
    if subprocess.run([*command, "--no-deps", "-r", str(requirements)], check=False).returncode != 0:
        if command == pip(venv):
            sys.exit("setup: the packages could not be installed, see above; the same command goes on from here")
        say("uv could not install them, see above: pip tries")
        command = pip(venv)
        subprocess.run([*command, "--no-deps", "-r", str(requirements)], check=True)
    if torch is not None and with_torch:
        say(f"installing {torch}" + " (a reference in tests only)" * (name == "test"))
        subprocess.run(pip(venv, torch, "-c", str(requirements)), check=True)
    if hashed:
        say(f"installing {', '.join(line.split()[0] for line in hashed)}")
        requirements.write_text("".join(f"{line}\n" for line in hashed), encoding="utf-8")
        subprocess.run(pip(venv, "--no-deps", "--require-hashes", "-r", str(requirements)), check=True)
    with open(ROOT / ".venv-project.lock", "w") as lock:  # setuptools writes into the folder: one environment at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([*command, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / ".venv")
    parser.add_argument("--set", choices=SETS, default="train", dest="name")
    parser.add_argument("--no_torch", action="store_true", help="test set: leave torch out")
    arguments = parser.parse_args()
    venv, with_torch = arguments.venv.absolute(), not arguments.no_torch

    if not lock_of(arguments.name).is_file():
        found = f"{sys.version_info.major}.{sys.version_info.minor}"
        locks = sorted((ROOT / "requirements").glob(f"{arguments.name}-py*.lock"))
        versions = " and ".join(lock.stem.partition("-py")[2] for lock in locks)
        variable = f"PYTHON_{arguments.name.upper()}" if arguments.name in ("vllm", "adapters", "tinker") else "PYTHON"
        example = f"make {variable}=python{versions.split()[-1]} ..."
        sys.exit(f"setup: {arguments.name}: there are lock files for Python {versions}, not for {found}: {example}")
    if is_installed(venv, arguments.name, with_torch):
        return
    start = time.monotonic()
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(venv.with_name(venv.name + ".lock"), "w") as lock:  # a second `make` waits for the first
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(venv, arguments.name, with_torch):
            return
        make_environment(venv)
        install(venv, arguments.name, with_torch)
        temporary = stamp_of(venv, arguments.name).with_suffix(".tmp")
        temporary.write_text(digest_of(venv, arguments.name, with_torch), encoding="utf-8")
        os.replace(temporary, stamp_of(venv, arguments.name))
        broken_off(venv).unlink()
    say(f"{venv} is ready ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd[:6]))
        sys.exit(f"setup: {command} ... failed, see above; the same command goes on from here")
