"""The first process of a sandbox. Never imported: its text is passed to the sandbox's own Python.

    a message with four descriptors arrives: input, standard output, standard error, reply
    a fork with these descriptors and with limits runs the program, once
    when it has ended, or "stop" arrives, all processes that it started are killed, and "STATUS ENTRIES" is sent
    when the socket closes, this process ends, and with it everything in the sandbox

STATUS is the fork's status from waitpid, ENTRIES the number of entries in the scratch folders afterwards.

Each run is forked from this process, which never executes code of the program. It does not know the expected results.
It imports little, as it starts once for every program.
"""

import _io
import _json
import _signal
import _socket
import atexit
import builtins
import marshal
import posix
import resource
import sys

CONTROL, SETUP = int(sys.argv[1]), int(sys.argv[2])
SCRATCH, SHARED = "/tmp", "/dev/shm"
ENTRIES = 10_000  # in each of the two folders: names use kernel memory that the folder's size does not limit
COUNT_SECONDS = 0.05  # interval between counts of them
# On Linux these paths need /proc, which the sandbox lacks: open and os.open map them to the descriptors.
STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
STREAMS |= {f"{folder}/{number}": number for folder in ("/dev/fd", "/proc/self/fd") for number in range(3)}
REAL_OPEN = posix.open


def serve() -> tuple[int, int, int, int]:
    """Serves the socket; returns only in a fork that is to run the program, with its descriptors."""
    control = _socket.socket(fileno=CONTROL)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # the first process of a namespace gets no signal from inside it
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGCHLD])
    control.send(b"ready")
    while True:
        message, ancillary, _, _ = control.recvmsg(16, 256)
        if not message:
            posix._exit(0)
        if message == b"stop":  # for a run that had already ended
            continue
        data = memoryview(ancillary[0][2]).cast("i")
        descriptors = (data[0], data[1], data[2], data[3])
        child = posix.fork()
        if child == 0:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGCHLD])
            return descriptors
        for descriptor in descriptors:
            posix.close(descriptor)
        status, entries = wait(child, control)
        control.send(b"%d %d" % (status, entries))


def wait(child: int, control: _socket.socket) -> tuple[int, int]:
    """Waits for the run, then kills all other processes. Returns (status, number of entries)."""
    status = None
    most = 0
    while status is None:
        ended, how = posix.waitpid(-1, posix.WNOHANG)
        if ended == child:
            status = how
        elif not ended:
            _signal.sigtimedwait([_signal.SIGCHLD], COUNT_SECONDS)
        most = used_entries()
        if status is None and (most > ENTRIES or is_stopped(control)):
            break
    try:  # noqa: SIM105 (nothing is imported)
        posix.kill(-1, _signal.SIGKILL)  # all processes but this one
    except ProcessLookupError:
        pass
    while True:
        try:
            ended, how = posix.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = how if ended == child else status
    most = max(most, used_entries())  # includes entries made in the meantime
    return status or 0, most if most > ENTRIES else sum(len(posix.listdir(folder)) for folder in (SCRATCH, SHARED))


def used_entries() -> int:
    return max(space.f_files - space.f_ffree for space in map(posix.statvfs, (SCRATCH, SHARED)))


def is_stopped(control: _socket.socket) -> bool:
    try:
        control.recv(16, _socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def confine(descriptors: tuple[int, int, int, int], setup: dict) -> None:
    """Sets limits that this process cannot lift. Keeps only the descriptors input, output, error and reply: 0 to 3."""
    # Uses copies: only the first of them can be below 4, and it is moved first.
    for place, descriptor in enumerate([posix.dup(descriptor) for descriptor in descriptors]):
        posix.dup2(descriptor, place, place != 3)  # the program's child processes do not inherit the reply
    posix.closerange(4, 1 << 20)
    for name, limit in setup["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if setup["user"]:
        posix.setgroups([])
        posix.setresgid(setup["user"], setup["user"], setup["user"])
        posix.setresuid(setup["user"], setup["user"], setup["user"])
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    posix.chdir(SCRATCH)


def run(setup: dict) -> None:
    """Runs the program as a script, or as a module with a function that is called. Exceptions end the process."""
    sys.set_int_max_str_digits(0)  # as for the authors of the tests; the run's time is limited anyway
    call = setup["function"]
    given = b""
    if call:
        while more := posix.read(0, 1 << 20):
            given += more
    for name, file in (
        ("stdin", _io.open(0, encoding="utf-8", closefd=False)),
        ("stdout", _io.open(1, "w", encoding="utf-8", closefd=False)),
        ("stderr", _io.open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)),
    ):
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    for modules, opens in ((("builtins", "io"), Opens(_io.open)), (("posix", "os"), Opens(REAL_OPEN, "path"))):
        for name in sys.modules.keys() & set(modules):
            vars(sys.modules[name])["open"] = opens
    for name in ("exit", "quit"):  # normally defined by the module site, which is not loaded
        setattr(builtins, name, sys.exit)
    sys.argv = ["program.py"]
    module = type(sys)("program" if call else "__main__")
    sys.modules[module.__name__] = module
    names = module.__dict__
    names.update(NAMES)
    names["__builtins__"] = builtins
    exec(compile(setup["program"], "program.py", "exec"), names)
    if not call:
        leave()
    solution = names.get("Solution")
    function = getattr(solution(), call, None) if isinstance(solution, type) else None
    function = names.get(call) if function is None else function
    if function is None:
        raise NameError(f"the program defines no {call}")
    reply = encoded(function(*marshal.loads(given))).encode()
    while reply:
        reply = reply[posix.write(3, reply) :]
    posix._exit(0)  # the reply is written: do not wait for threads


class Opens:
    """open or os.open with STREAMS. Not a function: like the real ones it gets no self as an attribute of a class."""

    def __init__(self, real, path: str = "file"):
        """path: the name of the first argument."""
        self.real, self.path = real, path

    def __call__(self, *arguments, **named):
        if self.path in named:
            arguments = (named.pop(self.path), *arguments)
        if arguments and not isinstance(arguments[0], int):
            number = STREAMS.get(posix.fspath(arguments[0]))
            if number is not None:
                number = posix.dup(number)
                return number if self.real is REAL_OPEN else self.real(number, *arguments[1:], **named)
        return self.real(*arguments, **named)


def encoded(value: object) -> str:
    """`value` as JSON. The module json would do the same, but its import takes longer than most programs run."""
    if isinstance(value, str):
        return _json.encode_basestring_ascii(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(encoded, value))}]"
    if isinstance(value, dict):
        keys = [encoded(key if isinstance(key, str) else encoded(key)) for key in value]
        return f"{{{','.join(map(':'.join, zip(keys, map(encoded, value.values()))))}}}"
    raise TypeError(f"the answer is or has {type(value).__name__}, which is no value of JSON")


def leave() -> None:
    """Ends like an interpreter, but without its teardown, which takes longer than most programs run."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if file is not None and not file.closed:
            file.flush()
    posix._exit(0)


with _io.open(SETUP, "rb") as file:
    SETUP_READ = marshal.loads(file.read())
# Executed once for all forks: imports that this project adds.
NAMES: dict = {}
exec(SETUP_READ["names"], NAMES)
DESCRIPTORS = serve()
confine(DESCRIPTORS, SETUP_READ)
run(SETUP_READ)
