"""The command that starts a sandbox: bubblewrap's options, its Python, and the user that runs a program."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence

PYTHON_FOLDER = "/python"  # folder in a sandbox that has the interpreter as `python`, for PATH
# Folders of the machine's commands, for sandboxes that run a shell; some commands are links into the last one.
COMMAND_FOLDERS = ("/usr/bin", "/bin", "/etc/alternatives")
OLDEST = (0, 8)  # oldest version of bubblewrap with all options used here
# Kernel settings that forbid user namespaces, with the forbidding value.
_SWITCHES = {
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
    "user/max_user_namespaces": "0",
}
# Security settings that a pod needs for a sandbox. The default profiles (RuntimeDefault) allow namespaces and mounts
# only with a capability that would open the node; unconfined, a process without capabilities can make them in its own
# user namespace.
POD_SECURITY = {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}
POD_NEEDS = (
    "in a pod the sandbox needs securityContext.seccompProfile.type and .appArmorProfile.type Unconfined in its "
    "container, and a node with user namespaces: sysctl user.max_user_namespaces above 0 and "
    "kernel.apparmor_restrict_unprivileged_userns 0"
)
# Bits of CapEff: with these root can make namespaces itself (the second is for the loopback device of a network)...
_ALONE = 1 << 21 | 1 << 12  # CAP_SYS_ADMIN, CAP_NET_ADMIN
_ANOTHER = 1 << 7 | 1 << 6 | 1 << 5  # ... with CAP_SETUID, CAP_SETGID and CAP_KILL it can use another user


def version() -> tuple[int, ...]:
    """The version of bubblewrap; () if it does not print one."""
    output = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", output)
    return tuple(int(number) for number in found.groups(default="0")) if found else ()


def forbidden() -> str:
    """A likely reason why sandboxes are forbidden, to append to a message; "" if none is known."""
    if os.geteuid() == 0 and _has(_ALONE):
        return ""
    for name, value in _SWITCHES.items():
        with contextlib.suppress(OSError):
            if pathlib.Path("/proc/sys", name).read_text().strip() == value:
                return f" (sysctl {name.replace('/', '.')} is {value})"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return f" ({POD_NEEDS})"
    if os.geteuid() == 0:
        return " (in a container: docker run --security-opt=seccomp=unconfined --security-opt=apparmor=unconfined)"
    return ""


@dataclasses.dataclass(frozen=True)
class User:
    """User ids that make a sandbox and run a program in it; 0 is the current user."""

    makes: int  # starts bwrap without any privilege, in a user namespace
    runs: int  # the process in the sandbox switches to it


def user() -> User:
    """As root, a random unused user id for every sandbox: the kernel counts processes per user."""
    if os.geteuid() != 0:
        return User(0, 0)
    with open("/proc/self/uid_map") as file:
        ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in file)]
    first, count = max(ranges, key=lambda pair: pair[0] + pair[1])
    count = min(count, 2**31 - first)  # bwrap writes it as a signed number
    if count < 60_000 or not _has(_ANOTHER):
        return User(0, 0)
    # From the upper half, as accounts have low numbers.
    unused = first + count // 2 + random.SystemRandom().randrange(max(1, count // 2 - 2))
    return User(0, unused) if _has(_ALONE) else User(unused, 0)


def _has(capabilities: int) -> bool:
    with open("/proc/self/status") as file:
        (held,) = (int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return held & capabilities == capabilities


@functools.cache
def _python() -> tuple[str, tuple[str, ...]]:
    """(path of the interpreter, bwrap options that mount what it needs)."""
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
    # bwrap would copy the permissions of /root, which others cannot enter; in the sandbox it holds only Python.
    parents = {str(parent) for path in (python, base, standard) for parent in pathlib.PurePath(path).parents}
    parents = (parents - {"/", "/lib"}) | {"/dev", "/usr"}
    options = [option for parent in sorted(parents) for option in ("--perms", "0755", "--dir", parent)] + options
    if os.path.isdir(site):
        options += ["--size", "65536", "--tmpfs", site, "--remount-ro", site]
    return python, tuple(options)


def command(
    filter_file: int, *, scratch_bytes: int, shared_bytes: int, as_root: bool, folders: Sequence[str] = ()
) -> list[str]:
    """bwrap with its options, and the Python command without its script's arguments.

    folders: folders of this machine that can be read in the sandbox.
    """
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    python, mounts = _python()
    # Root with enough capabilities needs no user namespace; it drops all privileges inside by switching the user.
    rights = ["--cap-drop", "ALL"]
    if as_root:
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        rights += ["--unshare-user"]
        if not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY:  # read-only in containers; the filter has the same effect
            rights += ["--disable-userns"]
    devices = [
        option for name in ("null", "zero", "urandom") for option in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    ]
    return [
        bwrap,
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
        *rights,
        *mounts,
        *("--perms", "0755", "--dir", PYTHON_FOLDER),
        *(option for name in ("python", "python3") for option in ("--symlink", python, f"{PYTHON_FOLDER}/{name}")),
        *devices,
        *("--perms", "1777", "--size", str(max(scratch_bytes, 65_536)), "--tmpfs", "/tmp"),
        *("--perms", "1777", "--size", str(max(shared_bytes, 65_536)), "--tmpfs", "/dev/shm"),
        *_folders(folders),
        *("--remount-ro", "/", "--chdir", "/"),
        *("--setenv", "PYTHONHASHSEED", "0", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        *("--seccomp", str(filter_file)),
        *("--", python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _inside()),
    ]


def _folders(folders: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        for parent in reversed(pathlib.PurePath(folder).parents[:-1]):
            yield from ("--perms", "0755", "--dir", str(parent))
        if os.path.islink(folder) and os.path.realpath(folder) in folders:  # such as /bin on most machines
            yield from ("--symlink", os.readlink(folder), folder)
        else:
            yield from ("--ro-bind", folder, folder)


@functools.cache
def _inside() -> str:
    return pathlib.Path(__file__).with_name("sandbox_inside.py").read_text(encoding="utf-8")
