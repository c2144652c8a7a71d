"""Programs that mean harm, each with the verdicts that are right for it.

The problem: standard input has a number, the program prints twice that. Where a program tries to get at something and
then answers as it should, it prints ESCAPED instead if it got there: so it is judged ok only if it was held.
"""

from tests.environments.hostile_files import FILES
from tests.environments.hostile_processes import PROCESSES

TESTS = {"function": "", "cases": [["21\n", ["42"]], ["4\n", ["8"]]]}
CALL_TESTS = {"function": "double", "cases": [[[21], [42]], [[4], [8]]]}

# name: (program, verdicts that are right)
VERDICTS: dict[str, tuple[str, set[str]]] = {
    "ends early with 0": (
        """
import sys
sys.exit(0)
""",
        {"wrong"},
    ),
    "ends early, harder": (
        """
import os
os._exit(0)
""",
        {"wrong"},
    ),
    "prints what another test wants": ("print(42)", {"wrong"}),
    "prints what all tests want": (
        """
print(42)
print(8)
""",
        {"wrong"},
    ),
    "patches what it can": (
        """
import builtins, json, sys, os
builtins.all = builtins.any = lambda *a: True
builtins.len = lambda x: 0
json.loads = json.dumps = lambda *a, **k: 'true'
sys.exit = os._exit
frame = sys._getframe()
while frame:
    for name in frame.f_globals:
        frame.f_globals[name] = True
    frame = frame.f_back
""",
        {"crashed", "wrong"},
    ),
    "answers on every descriptor": (
        """
import os
for f in range(3, 64):
    for text in (b'42', b'0 0', b'ready', b'{"kind": "ok"}'):
        try:
            os.write(f, text)
        except OSError:
            pass
""",
        {"wrong"},
    ),
    "keeps a file for the next test": (
        """
import os
n = int(input())
if os.path.exists('/tmp/seen'):
    print('SEEN')
else:
    open('/tmp/seen', 'w').close()
    print(n * 2)
""",
        {"ok"},
    ),
    "answers when it ends": (
        """
import atexit, os
n = int(input())
atexit.register(os._exit, 0)
atexit.register(print, n * 2 + 1)
""",
        {"wrong"},
    ),
    "crashes after a right answer": (
        """
print(int(input()) * 2)
import os
os.abort()
""",
        {"crashed"},
    ),
}

# Of the function `double`.
CALLS: dict[str, tuple[str, set[str]]] = {
    "a value that equals everything": (
        """
class Anything(int):
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
def double(n):
    return Anything(1)
""",
        {"wrong"},
    ),
    "a class that equals everything": (
        """
class Anything:
    def __eq__(self, other):
        return True
def double(n):
    return Anything()
""",
        {"crashed"},
    ),
    "a text that would be the number": (
        """
def double(n):
    return str(n * 2)
""",
        {"wrong"},
    ),
    "patches json": (
        """
import json
json.dumps = lambda *a, **k: '42'
def double(n):
    return 0
""",
        {"wrong"},
    ),
    "replies by itself": (
        """
import os
def double(n):
    os.write(3, b'42')
    os._exit(0)
""",
        {"wrong"},
    ),
    "replies twice": (
        """
import os
def double(n):
    os.write(3, str(n * 2).encode())
    return n * 2
""",
        {"wrong"},
    ),
    "replies through what it starts": (
        """
import os, time
def double(n):
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.1)
        os.write(3, b'42')
        os._exit(0)
    return 0
""",
        {"wrong"},
    ),
    "ends before it is called": (
        """
import sys
sys.exit(0)
""",
        {"crashed"},
    ),
    "a reply without end": (
        """
def double(n):
    return 'x' * 2**20
""",
        {"output"},
    ),
    "a value nested without end": (
        """
def double(n):
    x = []
    x.append(x)
    return x
""",
        {"crashed"},
    ),
    "a value nested deeply": (
        """
import os
def double(n):
    os.write(3, b'[' * 30000 + b']' * 30000)
    os._exit(0)
""",
        {"wrong"},
    ),
    "no number": (
        """
def double(n):
    return float('nan')
""",
        {"wrong"},
    ),
    "prints the answer": (
        """
def double(n):
    print(n * 2)
""",
        {"wrong"},
    ),
}

PROGRAMS = PROCESSES | FILES | VERDICTS
