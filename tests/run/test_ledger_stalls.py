"""What is no compute: storage blocks the trainer, it waits for a fleet of no servers, or its process was stopped."""

import pytest

from scalerl_jax.run.ledger import STOPPED_SECONDS
from scalerl_jax.run.ledger_file import CLASSES, read
from tests.run.test_ledger import Clock, counters, hours, make


class Stalling:
    """A trainer of 4 devices and a server of 2, with a fleet that calls twice a second; they began long ago."""

    def __init__(self, path, *, begun=True):
        self.clock = Clock()
        self.ledger = make(path, self.clock)
        self.serving, self.up, self.busy = True, 0.0, 0.0
        self.tick()
        if begun:
            self.ledger.begin()

    def tick(self):
        self.ledger.observe("a", counters(up=self.up, busy=self.busy))
        self.ledger.serving(self.serving)

    def stand_still(self, seconds, busy=0.0):
        """Time passes, and nobody calls the ledger. busy: of the server, in that time."""
        self.clock.now += seconds
        self.up, self.busy = self.up + seconds, self.busy + busy

    def passes(self, seconds, busy=0.0):
        for _ in range(round(2 * seconds)):
            self.stand_still(0.5, busy * 0.5 / seconds)
            self.tick()

    def work(self):
        """10 s of an update and 4 s of waiting; the server is busy for 7 s of it."""
        with self.ledger.trainer("busy"):
            self.passes(10, busy=5)
        self.passes(4, busy=2)

    def booked(self):
        return {name: 3600 * hours for name, hours in self.ledger.snapshot().items() if name.endswith("hours")}


def storage(run):
    with run.ledger.trainer("stalled"):
        run.passes(30)


def storage_that_holds_the_process(run):
    with run.ledger.trainer("stalled"):
        run.stand_still(300)


def no_server(run):
    run.serving = False
    run.tick()
    run.passes(1000)
    run.serving = True
    run.tick()


def stopped(run):
    run.stand_still(4000)
    run.tick()


def stopped_in_an_update(run):
    with run.ledger.trainer("busy"):
        stopped(run)


def stopped_in_an_evaluation(run):
    with run.ledger.trainer("evaluation"):
        run.stand_still(4000)


STALLS = {storage: 30, storage_that_holds_the_process: 300, no_server: 1000, stopped: 4000, stopped_in_an_update: 4000,
          stopped_in_an_evaluation: 4000}  # fmt: skip


@pytest.mark.parametrize("stall", STALLS, ids=lambda stall: stall.__name__)
def test_a_stall_is_no_compute(tmp_path, stall):
    """The same work with and without one; its seconds are those of the stall and in no other class."""
    with_one, without = Stalling(tmp_path / "a"), Stalling(tmp_path / "b")
    for run in (with_one, without):
        run.work()
    stall(with_one)
    for run in (with_one, without):
        run.work()
    expected = {"trainer_stalled_hours": 4 * STALLS[stall], "generator_stalled_hours": 2 * STALLS[stall]}
    assert without.booked()["device_hours"] == pytest.approx(28 * (4 + 2))
    assert with_one.booked() == pytest.approx(without.booked() | expected)


def test_what_a_server_does_while_the_trainer_stalls_stays_busy(tmp_path):
    run = Stalling(tmp_path / "l")
    with run.ledger.trainer("stalled"):
        run.passes(20, busy=15)
    run.passes(3, busy=1)
    row = run.booked()
    assert [row[f"generator_{kind}_hours"] for kind in CLASSES] == pytest.approx([2 * 16, 2 * 2, 0, 0, 2 * 5])


def test_only_a_trainer_that_waits_is_stalled_without_servers(tmp_path):
    run = Stalling(tmp_path / "l")
    run.serving = False
    run.tick()
    for kind, seconds in (("busy", 5), ("evaluation", 7), ("idle", 3)):
        with run.ledger.trainer(kind):
            run.passes(seconds)
    row = run.booked()
    assert [row[f"trainer_{kind}_hours"] for kind in CLASSES] == pytest.approx([4 * 5, 0, 4 * 7, 0, 4 * 3])
    assert row["generator_stalled_hours"] == pytest.approx(2 * 3)


def test_a_step_in_which_the_fleet_calls_late_is_no_stall(tmp_path):
    run = Stalling(tmp_path / "l")
    with run.ledger.trainer("busy"):
        for _ in range(100):
            run.stand_still(STOPPED_SECONDS, busy=STOPPED_SECONDS)
            run.tick()
    row = run.booked()
    assert row["trainer_busy_hours"] == pytest.approx(400 * STOPPED_SECONDS)
    assert row["trainer_stalled_hours"] == row["generator_stalled_hours"] == 0


def test_a_trainer_that_no_fleet_calls_is_never_stopped(tmp_path):
    """Nor is one before training begins: it loads and compiles for as long as that takes."""
    clock = Clock()
    ledger = make(tmp_path / "l", clock)
    with ledger.trainer("stalled"):
        clock.now += 1e4
    ledger.begin()
    clock.now += 1e4
    row = ledger.snapshot()
    assert hours(row, "trainer_setup", "trainer_idle", "trainer_stalled") == [4e4, 4e4, 0]
    run = Stalling(tmp_path / "m", begun=False)
    no_server(run)
    stopped(run)
    assert run.booked()["trainer_setup_hours"] == pytest.approx(4 * 5000)


def test_a_server_that_started_after_a_stall_was_not_stalled(tmp_path):
    run = Stalling(tmp_path / "l")
    storage(run)
    run.passes(20)
    run.ledger.observe("b", counters(up=15, busy=3))  # met 20 s after the stall
    with run.ledger.trainer("stalled"):
        run.passes(4)
        run.ledger.observe("c", counters(up=9, busy=3))  # 5 s before it began
    row = run.booked()
    assert row["generator_stalled_hours"] == pytest.approx(2 * (30 + 4 + 4))
    assert row["generator_idle_hours"] == pytest.approx(2 * (20 + 12 + 2))


def test_with_no_server_the_file_is_at_most_a_second_old_too(tmp_path):
    run = Stalling(tmp_path / "l")
    run.serving = False
    run.tick()
    for _ in range(20):
        run.clock.now += 0.5
        run.ledger.serving(False)
    saved = read(str(tmp_path / "l"))
    assert saved["seconds"]["trainer_stalled"] >= 4 * 9
