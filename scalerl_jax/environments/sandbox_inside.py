"""What runs as the first process of a sandbox; never imported: its text is given to the sandbox's own Python.

    a message with four descriptors comes in       input, standard output, standard error, reply
    a fork with those and with limits runs the program, once
    when it has ended, or "stop" comes in, everything else that it started is killed, and "STATUS ENTRIES" goes out
    the socket ends: so does this, and with it whatever is left in the sandbox

STATUS is the fork's as waitpid gives it, ENTRIES how many there are in the scratch folders afterwards.

Each run starts from this process, in which no line of the program has ever run. What the program is to answer is not
known here. Little is imported, as this starts once for every program.
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
ENTRIES = 10_000  # in each of the two: names take of the kernel's memory, not of the folder's size
COUNT_SECONDS = 0.05  # between two counts of them
# What Linux has by /proc, which is not in here: open and os.open take these for the descriptors.
STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
STREAMS |= {f"{folder}/{number}": number for folder in ("/dev/fd", "/proc/self/fd") for number in range(3)}
REAL_OPEN = posix.open


def serve() -> tuple[int, int, int, int]:
    """Returns the descriptors, in a fork that is to run the program."""
    control = _socket.socket(fileno=CONTROL)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # the first process of a namespace gets no signal from inside it
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGCHLD])
    control.send(b"ready")
    while True:
        message, ancillary, _, _ = control.recvmsg(16, 256)
        if not message:
            posix._exit(0)
        if message == b"stop":  # of a run that had ended by then
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
    """Until nothing runs but this."""
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
        posix.kill(-1, _signal.SIGKILL)  # all but this
    except ProcessLookupError:
        pass
    while True:
        try:
            ended, how = posix.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = how if ended == child else status
    most = max(most, used_entries())  # what came in the meantime
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
    """Limits that this process cannot lift again. Of its files it has input, output, error and reply: 0 to 3."""
    # Copies: only the first of them can be below 4, and that is moved first.
    for place, descriptor in enumerate([posix.dup(descriptor) for descriptor in descriptors]):
        posix.dup2(descriptor, place, place != 3)  # what the program starts does not inherit the reply
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
    """The program, as a script or as a module with a function that is called. Its exceptions are the process's."""
    sys.set_int_max_str_digits(0)  # as those who wrote the tests had it; the time is limited as it is
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
    for name in ("exit", "quit"):  # those of the module site, which is not loaded
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
    posix._exit(0)  # the answer is given: threads and what else is left do not matter


class Opens:
    """open or os.open, with STREAMS. No function: as an attribute of a class it gets no self, like the real ones."""

    def __init__(self, real, path: str = "file"):
        """path: what the first argument is called."""
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
    """JSON. The module json would do the same, and take longer to import than most programs to run."""
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
    """As an interpreter ends, without taking itself apart, which takes longer than most programs."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if file is not None and not file.closed:
            file.flush()
    posix._exit(0)


with _io.open(SETUP, "rb") as file:
    SETUP_READ = marshal.loads(file.read())
# Once for all forks: imports that are ours.
NAMES: dict = {}
exec(SETUP_READ["names"], NAMES)
DESCRIPTORS = serve()
confine(DESCRIPTORS, SETUP_READ)
run(SETUP_READ)
