"""The verifier's worker process: reads {"text", "answer"} lines, writes {"right": true | false | null} lines.

null: the time limit ran out. The first line it writes says that it is ready. It ends at the end of its input, that is
with the process that started it.
"""

import argparse
import json
import logging
import os
import resource
import signal
import sys

from math_verify import parse, verify

MEMORY_BYTES = 4 * 2**30  # address space: a number with 10^9 digits ends in MemoryError, not in the machine's memory
ORPHAN_FACTOR = 4  # times the limit, in CPU seconds spent on one answer: the kernel ends a worker nobody watches


class OutOfTime(BaseException):
    """Not an Exception: math-verify and sympy catch those and go on."""


def right(text: str, answer: str) -> bool:
    """Whether math-verify finds in `text` the value of `answer`.

    The reference is LaTeX or a plain number; where math-verify cannot read it, the texts must be equal.
    """
    # The boxed form is read as LaTeX whatever it holds; one that brings its own delimiters is read as it is.
    marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    # Their time limits are off (None): ours covers the whole question.
    gold = parse(marked, parsing_timeout=None)
    if not gold:
        return text.strip() == answer.strip()
    return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def judge(text: str, answer: str, seconds: float) -> bool | None:
    """The verdict; None after `seconds`. Raises nothing for any text."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_PROF, ORPHAN_FACTOR * seconds)
    try:
        return right(text, answer)
    except OutOfTime:
        return None
    except Exception:  # noqa: BLE001 (whatever parsers of arbitrary text may raise, the text is not the answer)
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _interrupt(*_: object) -> None:
    raise OutOfTime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    seconds = parser.parse_args().seconds
    logging.disable(logging.CRITICAL)  # math-verify logs every text it cannot read
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is not a reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    signal.signal(signal.SIGALRM, _interrupt)
    right("1", "1")  # the first question loads the grammars
    replies.write("ready\n")
    for line in sys.stdin:
        question = json.loads(line)
        replies.write(json.dumps({"right": judge(question["text"], question["answer"], seconds)}) + "\n")


if __name__ == "__main__":
    main()
