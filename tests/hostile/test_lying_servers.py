"""Real runs with one genuine server among many faulty ones: the run goes on, each group is trained once, the compute
booked is what was truly spent, and the log names every offender in one line.

Many modes share a run; `HOSTILE_MODES="hoards,drips" pytest tests/hostile/test_lying_servers.py -k alone` runs some by
themselves.
"""

import os
import pathlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from scalerl_jax.run.ledger_file import CLASSES
from tests.hostile.liars import Liars
from tests.hostile.modes import DROPPED, LEFT_OUT, MODES, RUNS, SENT_AWAY, STANDING, Mode, lines_about
from tests.hostile.status_lies import FORGED
from tests.support.runs import Run, config_of
from tests.support.servers import serve
from tests.train.chaos import check_rows

pytestmark = pytest.mark.slow

SETTINGS = {
    "max_steps": 1_000_000,  # each run is interrupted when it has shown what it has to
    "fleet.discovery_seconds": 0.3,
    "fleet.status_seconds": 2,
    "fleet.silence_seconds": 5,
    "fleet.stall_seconds": 5,
    "fleet.push_seconds": 5,
    "fleet.slowest_tokens_per_second": 10,
    # A version may take seconds on a busy machine, in which the trainer makes dozens: a server is asked all the same.
    "pacing.max_off_policy_steps": 1_000,
    "evaluation.every": 1_000,
    "optimizer.learning_rate": 1e-6,  # the policy stays as it is, and each update has a gradient
    "checkpoint.every": 50,
    "telemetry.samples_every": 1_000,
}
NAMING_SECONDS = 900.0
UPDATES_AFTER = 10  # once all have been named
MOST_LINES = 60  # of one offender
MOST_LINE = 2_000  # characters
LOG_BYTES = 2**20


@pytest.fixture
def genuine(tmp_path: pathlib.Path, model: str) -> Iterator[str]:
    with serve(tmp_path, 1, "--engine=jax", f"--model={model}") as addresses:
        yield addresses[0]


def booked(run: Run) -> dict[str, float]:
    """What the last row says that generators have spent, in all classes."""
    compute = run.metrics[-1]["compute"]
    return {
        "seconds": 3600 * sum(compute[f"generator_{kind}_hours"] for kind in CLASSES),
        "sampled": compute["sampled_tokens"] + compute["evaluation_tokens"],
        "trainer": 3600 * sum(compute[f"trainer_{kind}_hours"] for kind in CLASSES),
    }


def unnamed(log: str, addresses: Mapping[str, str], modes: Mapping[str, Mode]) -> list[str]:
    return [name for name, address in addresses.items() if modes[name].words and not modes[name].named_in(log, address)]


def turned_away(log: str, address: str) -> bool:
    return any("turned away" in line for line in lines_about(log, address))


def pending(log: str, addresses: Mapping[str, str], modes: Mapping[str, Mode]) -> list[str]:
    """Who is not named yet, or named and not sent away yet: some offences have to be seen twice."""
    stays = [name for name, of in addresses.items() if modes[name].expected == SENT_AWAY and not turned_away(log, of)]
    return unnamed(log, addresses, modes) + stays


def judge_log(log: str, addresses: Mapping[str, str], modes: Mapping[str, Mode]) -> list[str]:
    """What is wrong with what the trainer has said."""
    wrong = [
        f"{name} at {addresses[name]} is not named: {modes[name].words}" for name in unnamed(log, addresses, modes)
    ]
    lines = [line for line in log.splitlines() if not line.startswith(STANDING)]
    for name, address in addresses.items():
        about = lines_about(log, address)
        if len(about) > MOST_LINES:
            wrong.append(f"{name}: {len(about)} lines, like {about[-1]}")
        if modes[name].expected == SENT_AWAY and not turned_away(log, address):
            wrong.append(f"{name}: it was not turned away: {about[-3:]}")
        if modes[name].expected in (DROPPED, LEFT_OUT) and turned_away(log, address):
            wrong.append(f"{name}: it was turned away: {[line for line in about if 'turned away' in line]}")
    wrong += [f"a line of {len(line)} characters: {line[:200]}" for line in lines if len(line) > MOST_LINE]
    wrong += [f"a forged line: {line}" for line in lines if line.startswith(FORGED[:10])]
    if "Traceback" in log or "\x1b[2J" in log:
        wrong.append("a traceback, or a terminal's control code")
    if len(log) > LOG_BYTES:
        wrong.append(f"a log of {len(log)} bytes")
    return wrong


def between(run: Run) -> tuple[Any, dict[str, float], Any]:
    """What a row says to be booked, between the ledgers of some rows before it and of some after it."""

    def go_on() -> Any:
        rows = len(run.metrics)
        run.until(lambda: len(run.metrics) >= rows + 2, "the training goes on")
        return run.ledger()

    early = go_on()
    go_on()
    return early, booked(run), go_on()


def lead(run: Run, liars: Liars, listed: pathlib.Path, modes: Mapping[str, Mode], server: str) -> list[str]:
    """Lets the liars in, waits until each has come to what is expected of it, ends the run; what is wrong with it."""
    addresses = liars.addresses
    first, truth_before = time.monotonic(), liars.truth()
    early, before, ledger_before = between(run)
    joined = time.monotonic()
    listed.write_text("".join(f"{address}\n" for address in [server, *addresses.values()]))
    deadline, named = time.monotonic() + NAMING_SECONDS, dict[str, float]()
    while time.monotonic() < deadline and len(named) < len(addresses):
        assert run.process is not None and run.process.poll() is None, run.output()[-5_000:]
        log, now = run.output(), time.monotonic()
        missing = pending(log, addresses, modes)
        named |= {name: now for name in addresses if name not in missing and name not in named}
        time.sleep(0.2)
    steps = len(run.metrics)
    try:
        run.until(lambda: len(run.metrics) >= steps + UPDATES_AFTER, "the training goes on")
    except AssertionError as error:
        return [str(error), *judge_log(run.output(), addresses, modes)]
    left = time.monotonic()
    ledger, after, late = between(run)
    last, truth = time.monotonic(), liars.truth()
    os.kill(run.process.pid, signal.SIGINT)
    code = run.wait()

    wrong = judge_log(run.output(), addresses, modes)
    if code != 130:
        wrong.append(f"exit code {code}")
    # What was booked lies between the genuine server alone and all that the others truly did as long as they were in.
    genuine = max(
        ledger["servers"], key=lambda name: ledger["servers"][name][3] if name in ledger_before["servers"] else -1
    )

    def sampled(start: Any, end: Any) -> float:
        return end["servers"][genuine][3] - start["servers"][genuine][3]

    # The last status of the genuine one may be as old as a heartbeat and a call of its status.
    lowest = {"seconds": (left - joined) - 3.0, "sampled": sampled(ledger_before, ledger)}
    highest = {"seconds": last - first, "sampled": sampled(early, late)}
    of_liars = {"seconds": 0.0, "sampled": 0.0}
    for name in truth:
        until = named.get(name, last) + 2.0 if modes[name].expected == SENT_AWAY else last
        of_liars["seconds"] += min(last, until) - joined
        of_liars["sampled"] += truth[name]["sampled"] - truth_before[name]["sampled"]
    for kind in lowest:
        spent, low, high = after[kind] - before[kind], lowest[kind], highest[kind] + of_liars[kind]
        print(f"{kind}: {low:.1f} <= {spent:.1f} <= {high:.1f}")
        if not 0.99 * low - 1 <= spent <= 1.01 * high + 2:
            wrong.append(f"booked {spent:.1f} {kind} of generators, between {low:.1f} and {high:.1f} were spent")
    print(f"{len(run.metrics)} updates, named after {max(named.values(), default=joined) - joined:.0f} s, {steps} then")
    return wrong


def run_with(
    modes: dict[str, Mode], *, tmp_path: pathlib.Path, flags: Any, model: str, genuine: str, start: Any
) -> None:
    flags = [*flags, *(f"--config.{name}={value}" for name, value in SETTINGS.items())]
    listed = tmp_path / "servers"
    listed.write_text(f"{genuine}\n")
    with Liars(tmp_path, model, list(modes)) as liars:
        run = start(tmp_path / "run", *flags, f"--servers=file:{listed}")
        wrong = lead(run, liars, listed, modes, genuine)
    if os.environ.get("HOSTILE_LOG"):
        pathlib.Path(os.environ["HOSTILE_LOG"]).write_text(run.output())
    check_rows(run.metrics, config_of(flags))
    addresses = {address: name for name, address in liars.addresses.items()}
    assert not wrong, "\n".join(wrong) + f"\n{addresses}\n" + run.output()[-6_000:]


@pytest.mark.parametrize("part", RUNS)
def test_the_run_goes_on(part, tmp_path, flags, model, genuine, start):
    run_with(RUNS[part], tmp_path=tmp_path, flags=flags, model=model, genuine=genuine, start=start)


@pytest.mark.skipif("HOSTILE_MODES" not in os.environ, reason="HOSTILE_MODES names none")
def test_alone(tmp_path, flags, model, genuine, start):
    modes = {name.strip(): MODES[name.strip()] for name in os.environ["HOSTILE_MODES"].split(",")}
    run_with(modes, tmp_path=tmp_path, flags=flags, model=model, genuine=genuine, start=start)
