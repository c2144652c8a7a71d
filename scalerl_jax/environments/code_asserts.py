"""Unit tests that are Python: asserts on the results of a program's functions (HumanEval, MBPP, KodCode, LeetCode).

In the program's process a test would prove nothing, since the program could redefine what it checks. So the test and
the program run in two separate sandboxes:

    the test runs until it calls a function of the program, and reports the function and its arguments
    the program answers that call, in its sandbox
    the test restarts from its beginning, with the known answers, until it ends

Arguments and answers are passed as plain values: numbers, texts, lists, tuples, sets, dicts and combinations of them;
an iterator becomes a list of its items, and a list, dict or set that a function changed is changed in the test. An
exception of the program is raised in the test, as the built-in of that name or else as a new subclass of Exception.

A test has the standard library, and `raises` and `approx` of pytest. Any name that it does not define is a function of
the program, which may also be a method of its class Solution. A built-in is one only if the tests leave no other name
undefined: then it is the one that they call (`assert sum(10, 15) == 6`).
"""

import ast
import builtins
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.config import SandboxConfig
from scalerl_jax.environments.sandbox import Limits, ProgramResult, Sandbox

MOST_CALLS = 1000  # of one test
_PYTEST = re.compile(r"\bpytest\.(?!raises\b|approx\b)(\w+)")
_BINDS = ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.AugAssign
_OURS = ("solution", "pytest")  # modules that a test may import besides the standard library

# Code for both sandboxes: converts values to JSON and back.
_VALUES = """
def _scalerl_pack(value):
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind.__new__(kind, value)
    if value is None:
        return None
    if isinstance(value, list):
        return [_scalerl_pack(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[_scalerl_pack(key), _scalerl_pack(each)] for key, each in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    if isinstance(value, type) or not hasattr(value, "__iter__"):
        raise TypeError(f"{type(value).__name__} is no plain value")
    kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, (set, frozenset)) else ""
    packed = [_scalerl_pack(each) for each in value]
    return {kind: packed} if kind else packed

def _scalerl_unpack(value):
    if isinstance(value, list):
        return [_scalerl_unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, packed),) = value.items()
    each = [_scalerl_unpack(one) for one in packed]
    return {"dict": dict, "tuple": tuple, "set": set, "bytes": bytes, "complex": lambda z: complex(*z)}[kind](each)
"""

# Has its own namespace: the program may name its variables as built-ins are.
_PROGRAM = """
def _scalerl_run(names, *texts):
    _scalerl_call.names = names
    for text in texts:
        exec(compile(text, "program.py", "exec"), names)

def _scalerl_call(name, arguments, keywords):
    names = _scalerl_call.names
    solution = names.get("Solution")
    function = getattr(solution(), name, None) if isinstance(solution, type) else None
    function = names[name] if function is None else function
    arguments, keywords = _scalerl_unpack(arguments), _scalerl_unpack(keywords)
    try:
        given = function(*arguments, **keywords)
        return {"returned": _scalerl_pack(given), "changed": _scalerl_pack(arguments)}
    except Exception as error:
        return {"raised": [type(error).__name__, str(error)[:200]]}
"""

_TEST = """
class _ScalerlAsks(BaseException):
    pass

class _ScalerlPytest:
    class raises:
        def __init__(self, kinds, match=None):
            self.kinds, self.match = kinds, match
        def __enter__(self):
            return self
        def __exit__(self, kind, value, trace):
            import re
            assert kind is not None, f"{self.kinds} was not raised"
            self.value = value
            return issubclass(kind, self.kinds) and (self.match is None or bool(re.search(self.match, str(value))))

    class approx:
        def __init__(self, wanted, rel=1e-6, abs=1e-12):
            self.wanted, self.rel, self.abs = wanted, rel, abs
        def __eq__(self, given, wanted=None):
            import math
            wanted = self.wanted if wanted is None else wanted
            if isinstance(wanted, dict):
                return wanted.keys() == given.keys() and all(self.__eq__(given[k], wanted[k]) for k in wanted)
            if isinstance(wanted, (list, tuple)):
                return len(wanted) == len(given) and all(map(self.__eq__, given, wanted))
            return math.isclose(given, wanted, rel_tol=self.rel, abs_tol=self.abs)

def _scalerl_test(text, known, own):
    import builtins, random, sys
    answers = iter(known)
    random.seed(0)

    def proxy(name):
        def call(*arguments, **keywords):
            answer = next(answers, None)
            if answer is None:
                asked = _ScalerlAsks()
                asked.call = [name, _scalerl_pack(list(arguments)), _scalerl_pack(keywords)]
                raise asked
            if "raised" in answer:
                kind, message = answer["raised"]
                found = getattr(builtins, kind, None)
                # A program may give its exceptions the name of any built-in: exec would run the message here.
                is_error = isinstance(found, type) and issubclass(found, Exception)
                raise (found if is_error else type(kind, (Exception,), {}))(message)
            for before, after in zip(arguments, _scalerl_unpack(answer["changed"])):
                if isinstance(before, list):
                    before[:] = after
                elif isinstance(before, (dict, set)):
                    before.clear()
                    before.update(after)
            return _scalerl_unpack(answer["returned"])
        call.__name__ = name
        return call

    class Names(dict):
        def __missing__(self, name):
            return getattr(builtins, name) if hasattr(builtins, name) and name != own else proxy(name)

    class Solution:
        __all__ = ()
        def __getattr__(self, name):
            return proxy(name)

    sys.modules["solution"], sys.modules["pytest"] = Solution(), _ScalerlPytest
    names = Names(__name__="test", __builtins__=builtins)
    exec(_scalerl_imports, names)
    try:
        exec(compile(text, "test.py", "exec"), names)
        for name, test in list(names.items()):
            if name.startswith("test_") and callable(test):
                test()
    except _ScalerlAsks as asked:
        return {"call": asked.call}
    except Exception as error:
        message, lines, line, trace = f"{type(error).__name__}: {error}", text.splitlines(), 0, error.__traceback__
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "test.py" else line
            trace = trace.tb_next
        if 0 < line <= len(lines):
            message = f"{message.removesuffix(': ')} at {lines[line - 1].strip()}"
        return {"failed": message[:200]}
    return {"passed": True}
"""


def read(snippets: Sequence[str], *, setup: str = "", stub: str = "", where: str) -> dict[str, Any]:
    """Tests in the format of scores (code_tests.py): each of `snippets` is one test, executed after `setup`.

    stub: the beginning of the program in the prompt, whose definitions the program may omit. Raises ValueError if a
    test cannot run here, or has nothing that runs.
    """
    for number, snippet in enumerate(snippets, 1):
        _check(f"{setup}\n{snippet}", f"test {number} of {where}")
        _check_runs(_parsed(snippet, f"test {number} of {where}"), f"test {number} of {where}")
    return {"function": "", "setup": setup, "stub": stub, "asserts": True, "cases": [[text, [""]] for text in snippets]}


def of_check(text: str, called: str, where: str) -> list[str]:
    """Splits `def check(candidate): assert ...` into one test per assert; one test if it has other statements.

    Raises ValueError.
    """
    end = f"check({called.rpartition('.')[2]})"
    tree = _parsed(text, where)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(functions) != 1:
        raise ValueError(f"{where} defines no function check")
    body = functions[0].body
    if not all(isinstance(line, ast.Assert) for line in body):
        return [f"{text}\n{end}"]
    tests = []
    for line in body:
        functions[0].body = [line]
        tests.append(f"{ast.unparse(tree)}\n{end}")
    return tests


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is no Python: {getattr(error, 'msg', error)}") from None


def _check(text: str, where: str) -> None:
    for node in ast.walk(_parsed(text, where)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
            if node.module == "solution" and (classes := [a.name for a in node.names if a.name[:1].isupper()]):
                raise ValueError(f"{where} is of a class, {classes[0]}: only what functions give is compared")
        for name in names:
            if name.partition(".")[0] not in (*_OURS, *sys.stdlib_module_names):
                raise ValueError(f"{where} imports {name}: programs and tests have the standard library alone")
    if found := _PYTEST.search(text):
        raise ValueError(f"{where} uses pytest.{found[1]}: of pytest there are raises and approx")


def _check_runs(tree: ast.Module, where: str) -> None:
    """Raises ValueError if a test only defines what nothing calls, or is asynchronous: every program would pass it."""
    runs = False
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
            raise ValueError(f"{where} has async def {node.name}, which nothing awaits")
        if isinstance(node, ast.FunctionDef):
            runs = runs or node.name.startswith("test_")
        elif not isinstance(node, _BINDS):
            inside = [*ast.walk(node)]
            is_main = any(isinstance(each, ast.Name) and each.id == "__name__" for each in inside)
            runs = runs or (not is_main and any(isinstance(each, ast.Assert | ast.Call) for each in inside))
    if not runs:
        raise ValueError(
            f"{where} tests nothing: no statement of it checks or calls anything, and it has no function test_...() "
            "(check(candidate) needs the column entry_point)"
        )


def judge(program: str, tests: Mapping[str, Any], config: SandboxConfig, *, imports: str) -> tuple[str, int, str]:
    """(kind, tests passed, why), as in code_judge.Verdict. imports: import lines that the program may omit.

    Raises SandboxLost if no sandbox can be started any more.
    """
    end = time.monotonic() + config.all_seconds
    limits, count = Limits.of(config), len(tests["cases"])
    own = _builtin_of_the_program("\n".join([tests["setup"], *(text for text, _ in tests["cases"])]))
    around = f"_scalerl = {{}}\nexec({_VALUES + _PROGRAM!r}, _scalerl)\n"
    around += f"_scalerl['_scalerl_run'](globals(), {tests['stub']!r}, {program!r})\n"
    around += "_scalerl_call = _scalerl['_scalerl_call']"
    with (
        Sandbox(around, limits, function="_scalerl_call", names=imports) as programs,
        Sandbox(f"{_VALUES}{_TEST}_scalerl_imports = {tests['setup']!r}", limits, function="_scalerl_test") as judges,
    ):
        calls = 0
        for number, (text, _) in enumerate(tests["cases"]):
            known: list[Any] = []
            kind, why = _one(text, own, known, programs, judges, end)
            calls += len(known)
            if kind != "ok":
                return kind, number, f"test {number + 1} of {count}: {kind}: {why}"
    # One test alone may call nothing: HumanEval's have assert True among them.
    return ("ok", count, "") if calls else ("wrong", 0, "none of its tests calls the program")


def _builtin_of_the_program(text: str) -> str:
    """The built-in that is a function of the program in the tests `text`; "" if there is none."""
    nodes = [*ast.walk(ast.parse(text))]
    bound = {getattr(node, name, None) for node in nodes for name in ("name", "asname", "module")}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    loaded = {node.id for node in names} - bound
    if "solution" in bound or not all(hasattr(builtins, name) for name in loaded):
        return ""
    calls = [
        (node.func.id, node.args) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    checked = [each.id for name, given in calls if name == "check" for each in given if isinstance(each, ast.Name)]
    called = [name for name in checked or [name for name, _ in calls] if name in loaded]
    # The outermost, but rather sum than set in set(sum(x)).
    return min(called, key=lambda name: isinstance(getattr(builtins, name), type), default="")


def _one(text: str, own: str, known: list[Any], programs: Sandbox, judges: Sandbox, end: float) -> tuple[str, str]:
    """(kind, why) of one test. known: empty; gets the program's answers."""
    while len(known) <= MOST_CALLS:
        if (left := end - time.monotonic()) <= 0:
            return "timeout", "its tests took more than all_seconds"
        outcome = judges.run(json.dumps([text, known, own]).encode(), seconds=left)
        reply, problem = _reply(outcome)
        if reply is None:
            return "crashed" if outcome.kind == "ended" else outcome.kind, f"the test itself: {problem}"
        if "call" not in reply:
            return ("ok", "") if reply.get("passed") is True else ("wrong", str(reply.get("failed")))
        outcome = programs.run(json.dumps(reply["call"]).encode(), seconds=max(end - time.monotonic(), 1e-3))
        answer, problem = _reply(outcome)
        if answer is None:
            return "crashed" if outcome.kind == "ended" else outcome.kind, problem
        known.append(answer)
    return "wrong", f"it calls more than {MOST_CALLS} functions"


def _reply(outcome: ProgramResult) -> tuple[dict[str, Any] | None, str]:
    """(reply of the sandbox, "") or (None, reason)."""
    if outcome.kind != "ended":
        return None, outcome.why
    try:
        reply = json.loads(outcome.reply)
    except (ValueError, RecursionError):
        reply = None
    return (reply, "") if isinstance(reply, dict) else (None, "it ended without an answer")
