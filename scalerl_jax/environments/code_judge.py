"""A program against the unit tests of its problem, in a sandbox: stops at the first test that fails.

    ok         all tests
    wrong      it ended, and gave something else
    timeout    a test took longer than config.environment.sandbox.seconds, or all of them than all_seconds
    memory, output    it needed more than it may have
    crashed    an exception, an exit code other than 0, a signal

Programs of these data sets leave out imports that their judges make for them, as `List` of typing or `inf` of math: for
names that stand in the program and that NAMES knows, the same is done here.
"""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from scalerl_jax.config import SandboxConfig
from scalerl_jax.environments import code_asserts
from scalerl_jax.environments.code_outputs import differing_line, same_value
from scalerl_jax.environments.sandbox import Limits, Outcome, Sandbox

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
    """tests: as code_tests.py has them. Raises SandboxLost where no sandbox can be started any more."""
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
    """Imports of what the program names and may have left out; its own definitions come later and hold."""
    words = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", program))
    lines = []
    for module, names in NAMES.items():
        found = [name for name in names.split() if name in words]
        if found:
            lines.append(f"from {module} import {', '.join(found)}")
    lines += [f"import {module}" for module in MODULES.split() if module in words]
    return "\n".join(lines)


def _verdict(outcome: Outcome, right: list[Any], function: str) -> tuple[str, str]:
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
