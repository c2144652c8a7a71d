"""The packages that the accelerator's tests and benchmark need, for a machine that has a GPU and no network.

    python requirements/wheels.py fetch FOLDER             here: the wheels of accelerator-py3.12.lock into FOLDER
    python requirements/wheels.py install FOLDER TARGET    there: those that this Python lacks, into TARGET

The machine has Linux on x86-64, Python 3.12, JAX with CUDA (`pip install jax[cuda13]`) and PyTorch with all that these
bring; the lock holds the rest. What the machine has already is left as it is, unless it is older than setup.py allows.
TARGET goes on PYTHONPATH. Needs only Python's standard library and pip.
"""

import argparse
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = "3.12"
LOCK = ROOT / "requirements" / f"accelerator-py{VERSION}.lock"
MOST_MIB = 64  # of all wheels together
GLIBC_MINORS = (28, 27, 24, 17)  # pip takes each by its exact number


def locked() -> dict[str, str]:
    """Package -> version."""
    lines = LOCK.read_text(encoding="utf-8").split()
    return dict(line.split("==") for line in lines)


def fetch(folder: pathlib.Path) -> str:
    """Makes `folder` hold these wheels and no others; says how much that is."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={VERSION}", *platforms]
    subprocess.run([*command, f"--dest={folder}", f"--requirement={LOCK}"], check=True)
    for name, wheel in wheels(folder).items():
        if name not in locked():
            wheel.unlink()
    found = wheels(folder)
    size = sum(wheel.stat().st_size for wheel in found.values()) / 2**20
    if size > MOST_MIB:
        sys.exit(f"wheels: {size:.0f} MiB, more than {MOST_MIB}")
    return f"wheels: {len(found)} in {folder}, {size:.0f} MiB"


def wheels(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Package -> its wheel of the locked version, or where there is none of that, any other."""
    found: dict[str, pathlib.Path] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        name = name.lower().replace("_", "-")
        if name not in found or locked().get(name) == version:
            found[name] = wheel
    return found


def lacking(paths: list[str] | None = None) -> list[str]:
    """The locked packages that this Python has not, or has older than setup.py allows. paths: default sys.path."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    least = dict(re.findall(r'"([a-z0-9-]+)>=([0-9.]+)', setup))
    versions = {
        (d.metadata["Name"] or "").lower().replace("_", "-"): d.version
        for d in importlib.metadata.distributions(path=sys.path if paths is None else paths)
    }
    return [
        name
        for name in locked()
        if name not in versions or _numbers(versions[name]) < _numbers(least.get(name, "0"))
    ]  # fmt: skip


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def install(folder: pathlib.Path, target: pathlib.Path) -> str:
    """Puts what is lacking into `target`, which holds nothing else afterwards. Nothing is done where it is there."""
    names = lacking([path for path in sys.path if pathlib.Path(path) != target])
    there = wheels(folder) if names else {}
    missing = [name for name in names if name not in there]
    if missing:
        sys.exit(
            f"wheels: this Python ({sys.executable}) lacks {', '.join(missing)}, and {folder} has no wheels of them; "
            "`make accelerator-wheels`, where there is a network, fetches them"
        )
    if names and f"{sys.version_info.major}.{sys.version_info.minor}" != VERSION:
        sys.exit(f"wheels: they are for Python {VERSION}, and this is {sys.version.split()[0]} ({sys.executable})")
    stamp, wanted = target / "wheels", "\n".join([sys.version, *(there[name].name for name in names)])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        if names:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
            command += ["--no-deps", "--no-compile", "--no-cache-dir", f"--target={target}"]
            subprocess.run([*command, *(str(there[name]) for name in names)], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return f"wheels: {', '.join(names)} from {folder}" if names else "wheels: this Python has all that is needed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["fetch", "install"])
    parser.add_argument("folder", type=pathlib.Path, help="of the wheels")
    parser.add_argument("target", type=pathlib.Path, nargs="?", help="install: the folder that goes on PYTHONPATH")
    arguments = parser.parse_args()
    if arguments.what == "install":
        if arguments.target is None:
            parser.error("install: a TARGET is needed")
        print(install(arguments.folder.absolute(), arguments.target.absolute()), flush=True)
    else:
        print(fetch(arguments.folder.absolute()), flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"wheels: {' '.join(error.cmd[1:4])} ... failed, see above")
