"""Programs that mean harm: processes, signals and memory."""

from tests.environments.sandboxes import attempt

# name: (program, verdicts that are right)
PROCESSES: dict[str, tuple[str, set[str]]] = {
    "fork bomb": (
        """
import os
while True:
    os.fork()
""",
        {"crashed", "timeout"},
    ),
    "fork bomb that goes on": (
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        {"memory", "timeout"},
    ),
    "thread bomb": (
        """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(60,)).start()
""",
        {"crashed", "memory", "timeout"},
    ),
    "busy threads": (
        """
import threading
def spin():
    while True:
        pass
for _ in range(4):
    threading.Thread(target=spin).start()
spin()
""",
        {"timeout"},
    ),
    "daemon left behind": (
        """
import os, time
n = int(input())
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1)
        time.sleep(600)
    os._exit(0)
os.wait()
print(n * 2)
""",
        {"ok"},
    ),
    "daemon that holds standard output": (
        """
import os, time
n = int(input())
print(n * 2, flush=True)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
""",
        {"ok"},
    ),
    "kills its parent": (
        attempt("""
os.kill(os.getppid(), 9)
import time
time.sleep(0.2)
"""),
        {"ok"},
    ),
    "kills everybody": (
        """
import os
n = int(input())
print(n * 2, flush=True)
os.kill(-1, 9)
""",
        {"crashed", "ok"},
    ),
    "stops its parent": (
        attempt("""
import signal
os.kill(os.getppid(), signal.SIGSTOP)
"""),
        {"ok"},
    ),
    "tells its parent to end": (
        attempt("""
import signal
for s in (2, 15, 1, 10, 12, 14, 24):
    os.kill(os.getppid(), s)
"""),
        {"ok"},
    ),
    "ignores signals": (
        """
import signal
for s in range(1, 65):
    try:
        signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
        {"timeout"},
    ),
    "stops itself": (
        """
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
""",
        {"timeout"},
    ),
    "raises its own limits": (
        attempt("""
import resource
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
escaped = True
"""),
        {"ok"},
    ),
    "memory bomb": (
        """
x = []
while True:
    x.append(bytearray(2**24))
""",
        {"memory"},
    ),
    "memory bomb that goes on": (
        """
x = []
while True:
    try:
        x.append(bytearray(2**20))
    except MemoryError:
        pass
""",
        {"memory", "timeout"},
    ),
    "memory of many": (
        """
import os, time
for _ in range(5):
    if os.fork() == 0:
        x = b'x' * (100 * 2**20)
        time.sleep(60)
time.sleep(60)
""",
        {"memory"},
    ),
    "shared memory of many": (
        """
import mmap, os, time
for _ in range(5):
    if os.fork() == 0:
        m = mmap.mmap(-1, 100 * 2**20)
        m.write(b'x' * (100 * 2**20))
        time.sleep(60)
time.sleep(60)
""",
        {"memory"},
    ),
    "a file in memory": (
        attempt("""
f = os.memfd_create('x')
escaped = True
"""),
        {"ok"},
    ),
    "a long text": ("print('x' * 10**11)", {"memory"}),
    "a huge number": ("print(10**10**8)", {"crashed", "memory", "timeout"}),
    "a text that unpacks to much": (
        """
import zlib
bomb = zlib.compress(b'0' * 10**7)
x = [zlib.decompress(bomb) for _ in range(10**4)]
""",
        {"memory"},
    ),
    "deep recursion": (
        """
def f(n):
    return f(n + 1)
f(0)
""",
        {"crashed"},
    ),
    "deeper recursion": (
        """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __eq__(self, o):
        return repr(A()) == self
    def __repr__(self):
        return str(self == 1)
print(A())
""",
        {"crashed", "memory"},
    ),
}
