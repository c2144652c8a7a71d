"""Runs an MCP server, and ends it with all it has started: python mcp_process.py PARENT BYTES LINES COMMAND...

    standard input    the server's own
    standard output   what the server writes: lines of at most BYTES, and at most LINES of them
    standard error    at the end, one line: why the server was ended, or the last one that it wrote there

The end: the server ends, closes its output or writes too much; PARENT ends or sends SIGTERM. Then every process that
descends from the server is killed, whatever group or session it is in. Needs Linux. It imports little, and nothing of
the package, as it starts once for every episode.
"""

import ctypes
import os
import resource
import selectors
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS = 1.0  # for a server to end that has closed its output
_LONGEST_ERROR = 2000  # bytes


def main() -> None:
    parent, longest, most_lines, command = *map(int, sys.argv[1:4]), sys.argv[4:]
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that have ended need no wait
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, *(ctypes.c_ulong(given) for given in (value, 0, 0, 0))):
            raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        return  # it has ended already
    _, memory = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))  # a smaller one is of the process that lists the tools
    why = ""
    try:
        try:
            why = _run(command, longest, most_lines)
        except BrokenPipeError:
            pass  # nobody reads it any more
        except OSError as error:
            why = str(error)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        _kill_descendants()
        os.write(2, why.encode(errors="replace"))


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each thread of the parent that ends may send one
    sys.exit()


def _run(command: list[str], longest: int, most_lines: int) -> str:
    (output, to_output), (errors, to_errors) = os.pipe(), os.pipe()
    server = os.posix_spawnp(
        command[0], command, os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, to_output, 1), (os.POSIX_SPAWN_DUP2, to_errors, 2)],
        setsigdef=[signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores the last two
    )  # fmt: skip
    for descriptor in (0, to_output, to_errors):
        os.close(descriptor)
    return _forward(os.pidfd_open(server), output, errors, longest, most_lines)


def _forward(server: int, output: int, errors: int, longest: int, most_lines: int) -> str:
    """Returns at the end. The first three are descriptors, `server` one that is readable when the server has ended."""
    length, count, tail, closed = 0, 0, b"", False
    with selectors.DefaultSelector() as selector:
        for descriptor in (server, output, errors):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select(_END_SECONDS if closed else None)]
            for descriptor in (output, errors):
                if descriptor not in ready:
                    continue
                data = os.read(descriptor, 65_536)
                if not data:
                    selector.unregister(descriptor)
                    closed |= descriptor == output
                elif descriptor == errors:
                    tail = (tail + data)[-_LONGEST_ERROR:]
                else:
                    first, *lines = data.split(b"\n")
                    length += len(first)
                    if length > longest:
                        return f"it wrote a line of more than {longest} bytes"
                    length, count = len(lines[-1]) if lines else length, count + len(lines)
                    if count > most_lines:
                        return f"it wrote more than {most_lines} lines"
                    while data:
                        data = data[os.write(1, data) :]
            if not ready or ready == [server]:
                return next(reversed(tail.decode(errors="replace").strip().splitlines()), "")


def _kill_descendants() -> None:
    """The children of what is killed become this process's own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while children := [pid for pid in os.listdir("/proc") if pid.isdecimal() and _parent(pid) == os.getpid()]:
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
        for pid in children:
            os.waitpid(int(pid), 0)


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


if __name__ == "__main__":
    main()
