"""The commands that compute: each asks for huge pages, then runs as the module of its name does.

XLA on a CPU takes every result and every temporary from malloc and gives it back, and the kernel clears each page anew.
With pages of 2 MiB that is a fraction of the work; glibc (2.35 or newer) asks the kernel for them where it is told so
by GLIBC_TUNABLES, which it reads once, at the start of a process. So a command that was not told starts itself again,
before anything large is imported; what it starts inherits the variable. Somebody's own choice of
glibc.malloc.hugetlb, 0 included, is kept.

Left out on purpose: `python -m` starts the modules as they are.
"""

import os
import sys
from collections.abc import Mapping

TUNABLE = "glibc.malloc.hugetlb"
OLDEST_GLIBC = (2, 35)


def with_huge_pages(environment: Mapping[str, str], glibc: str) -> dict[str, str] | None:
    """The environment in which malloc uses huge pages; None: nothing is to be changed.

    glibc: "glibc 2.36", as the system names its C library; anything else has no such setting.
    """
    name, _, version = glibc.partition(" ")
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < OLDEST_GLIBC:
        return None
    tunables = environment.get("GLIBC_TUNABLES", "")
    if TUNABLE in tunables:
        return None
    return {**environment, "GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{TUNABLE}=1"]))}


def restart_with_huge_pages() -> None:
    """Returns where there is nothing to change; else this process begins once more, and this call never returns."""
    if sys.platform == "linux" and "CS_GNU_LIBC_VERSION" in os.confstr_names:
        environment = with_huge_pages(os.environ, os.confstr("CS_GNU_LIBC_VERSION") or "")
        if environment is not None:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def train() -> None:
    restart_with_huge_pages()
    from scalerl_jax.train import run

    run()


def sft() -> None:
    restart_with_huge_pages()
    from scalerl_jax.sft import run

    run()


def serve() -> None:
    restart_with_huge_pages()
    from rollout_server.serve import run

    run()
