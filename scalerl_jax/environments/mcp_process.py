"""Runs an MCP server, and ends it with all its descendants: python mcp_process.py PARENT BYTES LINES COMMAND...

    standard input    passed to the server
    standard output   the server's output: lines of at most BYTES bytes, and at most LINES of them
    standard error    one line at the end: why the server was ended, or the last line of its stderr

It ends when the server ends, closes its output or writes too much, or when PARENT ends or sends SIGTERM. Then every
descendant of the server is killed, whatever its group or session. Needs Linux. It imports little, and nothing of the
package, as it starts once for every episode.
"""

import ctypes
import os
import resource
import selectors
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS = 1.0  # time for a server to end after it closed its output
_LONGEST_ERROR = 2000  # bytes


def main() -> None:
    parent, longest, most_lines, command = *map(int, sys.argv[1:4]), sys.argv[4:]
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended orphans
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, *(ctypes.c_ulong(given) for given in (value, 0, 0, 0))):
            raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        return  # the parent has ended already
    _, memory = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))  # undoes the lower soft limit of the listing process
    why = ""
    try:
        try:
            why = _run(command, longest, most_lines)
        except BrokenPipeError:
            pass  # the parent no longer reads the output
        except OSError as error:
            why = str(error)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        _kill_descendants()
        os.write(2, why.encode(errors="replace"))


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each ending thread of the parent may cause one
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
    """Forwards the output until the server ends or is to be ended; returns the reason, or its last line of stderr.

    server, output, errors: descriptors; `server` is a pidfd, readable when the server has ended.
    """
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
    """Kills all descendants: the children of a killed process become children of this one."""
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
