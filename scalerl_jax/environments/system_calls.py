"""The system calls that a program in the sandbox may not make, as a filter that the kernel runs (seccomp, classic BPF).

A deny list of calls that share the kernel with the host or expose more of it: new namespaces, mounts, other processes'
memory, sockets, shared memory and message queues (which no process limit counts), keys, modules, tracing, clocks.
They fail with EPERM; clone3, whose flags a filter cannot see, with ENOSYS, so that the C library uses clone instead.
A call with another architecture's numbers (32 bits, x32) ends the process.

    load architecture; not ours: kill
    load number; x32: kill; clone3: ENOSYS; clone with a namespace flag: EPERM; one of DENIED: EPERM; else: allow

The instructions are assembled here: sixty numbers for two architectures need no library.
"""

import errno
import platform
import struct

# name: (x86-64, aarch64); None if the architecture lacks the call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
CLONE = (56, 220)
CLONE3 = 435  # on both
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; NEWTIME is no flag of clone, but part of a signal
NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
X32 = 0x40000000  # numbers from here on

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH_*

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # where they are in seccomp_data, on a little-endian machine
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def filter_program(machine: str = "") -> bytes:
    """The filter for `machine` ("": this one), as `struct sock_filter`s.

    Raises ValueError for an unknown machine.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no system call filter for {machine!r}: the sandbox knows {' and '.join(ARCHITECTURES)}")
    column, architecture = ARCHITECTURES[machine]
    numbers = sorted(number for pair in DENIED.values() if (number := pair[column]) is not None)
    # Final actions of the tests, by name; they are placed at the end.
    ends = {"allow": _ALLOW, "deny": _ERROR | errno.EPERM, "unknown": _ERROR | errno.ENOSYS, "kill": _KILL}
    tests: list[tuple[int, int, str, str]] = [  # code, operand, target if true, target if false ("": next instruction)
        (_LOAD, _ARCHITECTURE, "", ""),
        (_EQUAL, architecture, "", "kill"),
        (_LOAD, _NUMBER, "", ""),
        (_AT_LEAST, X32, "kill", ""),
        (_EQUAL, CLONE3, "unknown", ""),
        *((_EQUAL, number, "deny", "") for number in numbers),
        (_EQUAL, CLONE[column], "", "allow"),
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_ANY_BIT, NAMESPACES, "deny", "allow"),
    ]
    place = {name: len(tests) + i for i, name in enumerate(ends)}

    def jump(at: int, to: str) -> int:
        return place[to] - at - 1 if to else 0

    lines = [(code, jump(at, yes), jump(at, no), operand) for at, (code, operand, yes, no) in enumerate(tests)]
    lines += [(_RETURN, 0, 0, value) for value in ends.values()]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
