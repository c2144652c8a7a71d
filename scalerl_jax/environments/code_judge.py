"""Runs a program on the unit tests of its problem, in a sandbox; stops at the first test that fails.

    ok         all tests passed
    wrong      the program ended with another result
    timeout    a test exceeded config.environment.sandbox.seconds, or all tests together all_seconds
    memory, output    the program exceeded that limit
    crashed    an exception, an exit code other than 0, a signal

Programs of these data sets omit imports that the original judges add, such as `List` of typing or `inf` of math. Names
that occur in the program and are listed in NAMES are imported here too.

Results are compared outside the sandbox, where the program cannot influence the comparison.

Standard output is compared line by line, ignoring empty lines at the beginning and end:
    a line matches if it has as many words as the expected line, and each word matches
    words match if they are equal, or numbers of the same value; if the expected number has a decimal point or an
    exponent, within 1e-6 of it, absolute or relative; an expected 010101 is a text

Values are compared after both went through JSON (a tuple is a list, keys are strings):
    lists and objects element by element; numbers by value, within 1e-6 if the expected one is a float (the integer 5
    accepts 5.0, but not 5.000001); anything else must be equal
"""

import dataclasses
import decimal
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from scalerl_jax.config import SandboxConfig
from scalerl_jax.environments import code_asserts
from scalerl_jax.environments.sandbox import Limits, ProgramResult, Sandbox

TOLERANCE = 1e-6
LONGEST_NUMBER = 1_000  # characters; longer ones are compared as words
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_TEXT = re.compile(r"0\d+", re.ASCII)


def differing_line(wanted: str, given: str) -> tuple[str, str] | None:
    """The first pair of lines (wanted, given) that differs; "" stands for a missing line."""
    wanted_lines, given_lines = wanted.strip().split("\n"), given.strip().split("\n")
    for i in range(max(len(wanted_lines), len(given_lines))):
        left = wanted_lines[i].strip() if i < len(wanted_lines) else None
        right = given_lines[i].strip() if i < len(given_lines) else None
        if left == right:
            continue
        if left is None or right is None:
            return left or "", right or ""
        words, others = left.split(), right.split()
        if len(words) != len(others) or not all(map(_alike, words, others)):
            return left, right
    return None


def _alike(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    if max(len(wanted), len(given)) > LONGEST_NUMBER:
        return False
    if not _NUMBER.fullmatch(wanted) or not _NUMBER.fullmatch(given) or _TEXT.fullmatch(wanted):
        return False
    if re.search(r"[.eE]", wanted):
        return _near(float(wanted), float(given))
    return decimal.Decimal(wanted) == decimal.Decimal(given)


def _near(wanted: float, given: float) -> bool:
    return wanted == given or abs(wanted - given) <= TOLERANCE * max(1.0, abs(wanted)) < float("inf")


def same_value(wanted: Any, given: Any) -> bool:
    """Compares two JSON values."""
    if isinstance(wanted, list) and isinstance(given, list):
        return len(wanted) == len(given) and all(map(same_value, wanted, given))
    if isinstance(wanted, dict) and isinstance(given, dict):
        return wanted.keys() == given.keys() and all(same_value(wanted[key], given[key]) for key in wanted)
    if isinstance(wanted, int | float) and isinstance(given, int | float):
        if not isinstance(wanted, float):
            return wanted == given
        try:
            return _near(wanted, float(given))
        except OverflowError:  # an integer that no float comes near
            return False
    return type(wanted) is type(given) and wanted == given


SHORT = 80  # characters of a value in a message

NAMES: Mapping[str, str] = {
    "typing": "Any Callable Deque DefaultDict Dict Generator Iterable Iterator List Mapping NamedTuple Optional "
    "Sequence Set Tuple Type TypeVar Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "itertools": "accumulate chain combinations combinations_with_replacement groupby pairwise permutations product "
    "zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log10 log2 pi prod sqrt",
    "string": "ascii_letters ascii_lowercase ascii_uppercase",
    "copy": "deepcopy",
    "datetime": "timedelta",
}
MODULES = "bisect collections copy datetime functools heapq itertools json math operator random re string sys time"


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: str  # as above
    passed: int  # tests, up to the first that failed
    tests: int
    why: str  # which test failed, and how; "" where none did


def judge(program: str, tests: Mapping[str, Any], config: SandboxConfig) -> Verdict:
    """Runs `tests` (in the format of code_tests.py). Raises SandboxLost if no sandbox can be started any more."""
    cases, function = tests["cases"], tests["function"]
    if "asserts" in tests:
        kind, passed, why = code_asserts.judge(program, tests, config, imports=missing_imports(program))
        return Verdict(kind, passed, len(cases), why)
    end = time.monotonic() + config.all_seconds
    with Sandbox(program, Limits.of(config), function=function, names=missing_imports(program)) as sandbox:
        for number, (given, right) in enumerate(cases):
            left = end - time.monotonic()
            if left <= 0:
                kind, why = "timeout", f"its tests took more than {config.all_seconds:g} s"
            else:
                data = json.dumps(given) if function else given
                kind, why = _verdict(sandbox.run(data.encode(), seconds=left), right, function)
            if kind != "ok":
                return Verdict(kind, number, len(cases), f"test {number + 1} of {len(cases)}: {kind}: {why}")
    return Verdict("ok", len(cases), len(cases), "")


def missing_imports(program: str) -> str:
    """Import lines for known names in the program that it may not import; its own definitions come later and win."""
    words = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", program))
    lines = []
    for module, names in NAMES.items():
        found = [name for name in names.split() if name in words]
        if found:
            lines.append(f"from {module} import {', '.join(found)}")
    lines += [f"import {module}" for module in MODULES.split() if module in words]
    return "\n".join(lines)


def _verdict(outcome: ProgramResult, right: list[Any], function: str) -> tuple[str, str]:
    if outcome.kind != "ended":
        return outcome.kind, outcome.why
    if function:
        if not outcome.reply:
            return "crashed", "it ended without an answer"
        try:
            value = json.loads(outcome.reply)
            same = any(same_value(wanted, value) for wanted in right)
        except (ValueError, RecursionError):
            return "wrong", "its answer cannot be read"
        return ("ok", "") if same else ("wrong", f"gave {_short(value)}, wanted {_short(right[0])}")
    differing = differing_line(right[0], outcome.output.decode("utf-8", errors="replace"))
    if differing is None:
        return "ok", ""
    return "wrong", f"printed {_short(differing[1])}, wanted {_short(differing[0])}"


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."
