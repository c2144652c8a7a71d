"""The command that starts a sandbox: bubblewrap's options, the Python in there, and who runs a program."""

import contextlib
import functools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import sysconfig

OLDEST = (0, 8)  # bubblewrap's, with all options that are used here
# What makes the kernel refuse user namespaces, where we are not root: the value with which it does.
_SWITCHES = {
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
    "user/max_user_namespaces": "0",
}


def version() -> tuple[int, ...]:
    """Of bubblewrap; () where it does not say."""
    said = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", said)
    return tuple(int(number) for number in found.groups(default="0")) if found else ()


def forbidden() -> str:
    """What may be in the way, for the end of a message; "": nothing that is known."""
    if os.geteuid() == 0:
        return " (root needs CAP_SYS_ADMIN for it: a container that was given --cap-add=SYS_ADMIN)"
    for name, value in _SWITCHES.items():
        with contextlib.suppress(OSError):
            if pathlib.Path("/proc/sys", name).read_text().strip() == value:
                return f" (sysctl {name.replace('/', '.')} is {value})"
    return ""


def user() -> int:
    """Who runs a program if we are root: a number that is nobody's, another for every sandbox. 0: we are not."""
    if os.geteuid() != 0:
        return 0
    with open("/proc/self/uid_map") as file:
        ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in file)]
    first, count = max(ranges, key=lambda pair: pair[0] + pair[1])
    # The upper half: accounts are numbered from below. The kernel counts processes by it.
    return first + count // 2 + random.SystemRandom().randrange(max(1, count // 2 - 2)) if count >= 60_000 else 0


@functools.cache
def _python() -> tuple[str, tuple[str, ...]]:
    """(the interpreter, what must be mounted for it)."""
    base = os.path.realpath(sys.base_prefix)
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    standard = os.path.realpath(sysconfig.get_path("stdlib", vars={"base": base, "installed_base": base}))
    site = os.path.join(standard, "site-packages")
    options: list[str] = []
    for folder in ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    for folder in (os.path.join(base, "lib"), os.path.join(base, "lib64"), standard):
        if os.path.isdir(folder) and not folder.startswith(("/usr/lib", "/lib")):
            options += ["--ro-bind", folder, folder]
    options += ["--ro-bind", python, python]
    # bwrap takes over that /root is closed to others; in there it holds nothing but Python.
    parents = {str(parent) for path in (python, base, standard) for parent in pathlib.PurePath(path).parents}
    parents = (parents - {"/", "/lib"}) | {"/dev", "/usr"}
    options = [option for parent in sorted(parents) for option in ("--perms", "0755", "--dir", parent)] + options
    if os.path.isdir(site):
        options += ["--size", "65536", "--tmpfs", site, "--remount-ro", site]
    return python, tuple(options)


def command(filter_file: int, scratch_bytes: int, *, as_root: bool) -> list[str]:
    """bwrap and its options, and the Python in there up to its script's arguments."""
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    python, mounts = _python()
    # Root needs no user namespace, and drops everything in there by becoming another user.
    rights = ["--cap-drop", "ALL"]
    if as_root:
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        rights += ["--unshare-user", "--disable-userns"]
    devices = [
        option for name in ("null", "zero", "urandom") for option in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    ]
    return [
        bwrap,
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
        *rights,
        *mounts,
        *devices,
        *("--perms", "1777", "--size", str(max(scratch_bytes, 65_536)), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/"),
        *("--setenv", "PYTHONHASHSEED", "0", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        *("--seccomp", str(filter_file)),
        *("--", python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _inside()),
    ]


@functools.cache
def _inside() -> str:
    return pathlib.Path(__file__).with_name("sandbox_inside.py").read_text(encoding="utf-8")
