"""The compute ledger: every device-second in one class, whoever restarts; FLOPs against a direct count."""

import dataclasses
import itertools
import json
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.base import Row
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.run.ledger import STOPPED_SECONDS, Ledger, ModelShape, ServerCounters
from scalerl_jax.run.ledger_file import CLASSES, read
from tests.support.models import toy_decoder

SHAPE = ModelShape.of(
    DecoderConfig(vocab_size=384, hidden_size=96, layers=3, heads=4, kv_heads=2, head_dim=32, intermediate_size=256)
)


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def counters(up, busy, sampled=0, forced=0, prefill=0, devices=2):
    return ServerCounters(devices, up, busy, sampled, forced, prefill)


def make(path, clock, devices=4, wall=5000.0, shape=SHAPE):
    return Ledger(str(path), trainer_devices=devices, shape=shape, clock=clock, wall=lambda: wall)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(tmp_path, clock):
    """Of a run whose training begins now."""
    ledger = make(tmp_path / "l", clock)
    ledger.begin()
    return ledger


def hours(row, *names):
    return [pytest.approx(3600 * row[f"{name}_hours"]) for name in names]


def test_the_trainers_time(tmp_path):
    clock = Clock()
    ledger = make(tmp_path / "l", clock)
    clock.now += 100  # loading and compiling
    with ledger.trainer("evaluation"):
        clock.now += 30
    assert ledger.snapshot()["device_hours"] == 0.0  # the evaluation at step 0
    ledger.begin()
    clock.now += 5
    with ledger.trainer("busy"):
        clock.now += 20
        with ledger.trainer("evaluation"):
            clock.now += 7
        clock.now += 1
    clock.now += 2
    row = ledger.snapshot()
    assert hours(row, "trainer_setup", "trainer_busy", "trainer_idle", "trainer_evaluation") == [
        400,
        21 * 4,
        7 * 4,
        37 * 4,
    ]
    assert row["device_hours"] * 3600 == pytest.approx(28 * 4)


def test_generators_are_booked_by_process(tmp_path):
    clock = Clock()
    ledger = make(tmp_path / "l", clock)
    clock.now += 50
    ledger.observe("a", counters(up=40, busy=1, sampled=8))  # its probe
    ledger.observe("old", counters(up=9e5, busy=8e5, sampled=10**9))  # another run's work is not ours
    ledger.begin()
    clock.now += 10
    ledger.observe("a", counters(up=50, busy=8, sampled=108))
    ledger.observe("old", counters(up=9e5 + 10, busy=8e5 + 4, sampled=10**9 + 5))
    clock.now += 6
    ledger.observe("a", counters(up=56, busy=12, sampled=208), evaluating=True)
    clock.now += 3
    ledger.observe("a2", counters(up=2, busy=1, sampled=11))  # a again, after a crash
    row = ledger.snapshot()
    assert hours(row, "generator_setup", "generator_busy", "generator_idle", "generator_evaluation") == [
        80,
        2 * (7 + 4 + 1),
        2 * (3 + 6 + 1),
        12,
    ]
    assert (row["sampled_tokens"], row["evaluation_tokens"]) == (100 + 5 + 11, 100)


def test_teachers_are_a_class_of_their_own(tmp_path):
    clock = Clock()
    ledger = make(tmp_path / "l", clock)
    clock.now += 10
    ledger.observe("t", counters(10, 0), teacher=True)  # before training begins
    ledger.begin()
    clock.now += 30
    ledger.observe("t", counters(40, 0), teacher=True)
    ledger.observe("g", counters(25, 20))
    row = ledger.snapshot()
    assert hours(row, "teacher", "generator_busy", "generator_idle", "trainer_idle") == [2 * 30, 40, 10, 4 * 30]
    assert 3600 * row["device_hours"] == pytest.approx(50 + 120)
    assert make(tmp_path / "l", clock).snapshot()["teacher_hours"] == row["teacher_hours"]


def test_compute_stays_booked_over_a_kill(tmp_path, clock, ledger):
    clock.now += 60
    ledger.observe("a", counters(up=60, busy=50, sampled=500))  # saves: the last one is a minute old
    before = ledger.snapshot()
    clock.now += 0.5
    ledger.observe("a", counters(up=60.5, busy=50.5, sampled=505))  # not saved any more; then killed

    clock = Clock(now=3.0)  # another boot, another clock
    ledger = make(tmp_path / "l", clock, wall=5000.0 + 1010)
    assert ledger.snapshot() == before
    clock.now += 7
    ledger.begin()
    clock.now += 1
    # It decoded for 5 s after the last look, then stood alone for 1000 s, of which this trainer saw 8.
    ledger.observe("a", counters(up=1065, busy=55, sampled=550))
    row = ledger.snapshot()
    assert hours(row, "generator_busy", "generator_idle", "trainer_idle") == [2 * 55, 2 * (10 + 3), 60 * 4 + 4]
    assert row["sampled_tokens"] == 550
    assert row["trainer_setup_hours"] * 3600 == pytest.approx(28)


def test_the_file_is_at_most_a_second_old_and_always_whole(tmp_path):
    clock = Clock()
    ledger = make(tmp_path / "l", clock)
    written = []
    for _ in range(100):
        clock.now += 0.1
        ledger.observe("a", counters(up=1, busy=1))
        if (tmp_path / "l").exists():
            written.append((tmp_path / "l").stat().st_mtime_ns)
            make(tmp_path / "l", clock)
    assert 9 <= len(set(written)) <= 11


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_every_second_is_in_exactly_one_class(tmp_path_factory, seed):
    """A random run with restarts of trainer and servers, and with stalls of each kind: classes sum to the time there
    was, and nothing shrinks."""
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("ledger") / "l"
    clock = Clock()
    total = {"trainer": 0.0, "generator": 0.0}
    rows = []
    ledger = Ledger(str(path), trainer_devices=1, shape=SHAPE, clock=clock, wall=clock)
    server, up, busy, name = {}, 0.0, 0.0, 0

    def observe():
        ledger.observe(
            f"s{name}", counters(up, busy, devices=1, sampled=int(100 * busy)), evaluating=rng.random() < 0.3
        )
        server["seen"] = up

    for _ in range(rng.randint(1, 60)):
        kind = rng.choice(["pass", "pass", "stop", "serving", "observe", "server dies", "trainer dies", "begin", "row"])
        if kind in ("pass", "stop"):
            seconds = rng.uniform(0, 3) if kind == "pass" else rng.uniform(0, 5 * STOPPED_SECONDS)
            with ledger.trainer(rng.choice(["busy", "evaluation", "idle", "stalled"])):
                clock.now += seconds
            total["trainer"] += seconds
            up += seconds
            busy += seconds * rng.random()
        elif kind == "server dies":
            observe()
            total["generator"] += up
            name, up, busy = name + 1, 0.0, 0.0
        elif kind == "trainer dies":
            observe()
            ledger.save()
            ledger = Ledger(str(path), trainer_devices=1, shape=SHAPE, clock=clock, wall=clock)
        elif kind == "begin":
            ledger.begin()
        elif kind == "observe":
            observe()
        elif kind == "serving":
            ledger.serving(rng.random() < 0.5)
        else:
            rows.append(ledger.snapshot())
    observe()
    total["generator"] += up
    rows.append(ledger.snapshot())
    for side, seconds in total.items():
        classes = [rows[-1][f"{side}_{kind}_hours"] for kind in CLASSES]
        assert min(classes) >= 0 and sum(classes) * 3600 == pytest.approx(seconds, abs=1e-6)
    for earlier, later in itertools.pairwise(rows):
        assert all(later[key] >= earlier[key] for key in earlier)
        assert later["device_hours"] == pytest.approx(
            sum(later[f"{side}_{kind}_hours"] for side in total for kind in ("busy", "idle"))
        )


def test_flops_against_a_count_of_every_product():
    """One token at a time: two FLOPs for each multiply-add of each weight, and of scores and values."""
    prompt, completion = 7, 11
    total = 0
    for position in range(prompt + completion):
        for _ in range(3):  # layers
            for rows, columns in ((96, 128), (96, 64), (96, 64), (128, 96), (96, 256), (96, 256), (256, 96)):
                total += 2 * rows * columns
            total += 2 * (2 * 4 * 32 * (position + 1))  # heads 4 x 32: q.k and p.v
        total += 2 * 384 * 96  # the head
    length = prompt + completion
    assert SHAPE.forward_flops(tokens=length, context=length * (length + 1) / 2) == total
    assert SHAPE.update_flops([length, length]) == 6 * total
    adapted = dataclasses.replace(SHAPE, adapted=True)  # no gradient of a weight: a product of each less
    assert SHAPE.update_flops([length]) - adapted.update_flops([length]) == 2 * SHAPE.matrix_parameters * length


def test_the_context_of_llama_4_s_local_layers_is_their_chunk_s(tmp_path):
    """By hand: three layers of four attend inside chunks of 8 positions."""
    shape = ModelShape.of(toy_decoder(family="llama4_text", layers=4, nope_interval=4, attention_chunk=8))

    def seen(start, stop):
        return sum(3 * (at % 8 + 1) + at + 1 for at in range(start, stop)) / 4

    for length in (1, 7, 8, 9, 40, 41):
        assert shape.context(length) == seen(0, length)
    ledger = make(tmp_path / "l", Clock(), shape=shape)
    ledger.begin()
    ledger.observe("a", counters(up=1, busy=1, sampled=30, prefill=7))
    ledger.finished(prompt_tokens=7, completion_tokens=[11, 19])
    ledger.trained([18, 26])
    row = ledger.snapshot()
    generated = shape.forward_flops(tokens=37, context=seen(7, 18) + seen(7, 26) + seen(0, 7))
    assert row["generator_flops"] == pytest.approx(generated)
    assert row["trainer_flops"] == pytest.approx(3 * shape.forward_flops(tokens=44, context=seen(0, 18) + seen(0, 26)))


def test_a_branch_has_the_context_of_its_own_prompt(tmp_path, ledger):
    """Two completions of the row's prompt, the second with a further branch, and a run of an agent."""

    def sampled(tokens, **fields):
        ids, zeros = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
        return Completion(1, "g", 0, ids, zeros, ((0, 0, tokens),), (), "stop", **fields)

    later, own = (sampled(tokens, prompt=np.zeros(prompt, np.int32)) for tokens, prompt in ((5, 40), (9, 30)))
    row, direct = Row("", token_ids=np.zeros(7, np.int32)), make(tmp_path / "direct", Clock())
    for made in ((sampled(11), sampled(19, others=(later,))), (own,)):
        ledger.finished_groups([FinishedGroup(0, row, made, (), 0.0, 0.0)])
    for prompt, tokens in ((7, [11, 19]), (40, [5]), (30, [9])):
        direct.finished(prompt_tokens=prompt, completion_tokens=tokens)
    assert ledger._books["finished"] == direct._books["finished"]


def test_generators_flops_use_the_context_of_what_came_home(clock, ledger):
    clock.now += 10
    # One group: the prompt once, then two completions, one of them with 2 forced tokens.
    ledger.observe("a", counters(up=10, busy=9, sampled=28, forced=2, prefill=7))
    ledger.finished(prompt_tokens=7, completion_tokens=[11, 19])
    ledger.trained([18, 26])
    row = ledger.snapshot()

    def direct(length):
        return SHAPE.forward_flops(tokens=length, context=length * (length + 1) / 2)

    expected = direct(18) + direct(26) - direct(7)  # the shared prefill passes once
    assert row["generator_flops"] == pytest.approx(expected)
    assert row["trainer_flops"] == pytest.approx(3 * (direct(18) + direct(26)))
    assert row["model_flops"] == row["generator_flops"] + row["trainer_flops"]
    assert (row["trained_tokens"], row["evaluation_flops"], row["setup_flops"]) == (44, 0, 0)


def test_an_estimate_that_shrinks_lowers_no_column(tmp_path, ledger):
    ledger.observe("a", counters(up=0, busy=0, sampled=1000, prefill=100))
    ledger.finished(prompt_tokens=50, completion_tokens=[400])  # a long one came home first
    rows = [ledger.snapshot()]
    ledger.finished(prompt_tokens=2, completion_tokens=[5] * 50)
    rows.append(ledger.snapshot())
    rows.append(make(tmp_path / "l", Clock()).snapshot())  # nor does a restart
    for name in ("generator_flops", "model_flops"):
        assert rows[0][name] == rows[1][name] == rows[2][name] > 0, name
    ledger.observe("a", counters(up=0, busy=0, sampled=9000, prefill=100))
    assert ledger.snapshot()["generator_flops"] > rows[0]["generator_flops"]


def test_two_threads_book_at_once(tmp_path):
    ledger = Ledger(str(tmp_path / "l"), trainer_devices=1, shape=SHAPE, save_seconds=0.0)
    ledger.begin()

    def fleet(name):
        for n in range(1, 101):
            ledger.observe(name, counters(up=n * 1e-6, busy=0, sampled=n))

    threads = [threading.Thread(target=fleet, args=(f"s{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        with ledger.trainer("busy"):
            ledger.trained([3])
    for thread in threads:
        thread.join()
    row = ledger.snapshot()
    assert (row["sampled_tokens"], row["trained_tokens"]) == (400, 300)
    again = Ledger(str(tmp_path / "l"), trainer_devices=1, shape=SHAPE, clock=Clock()).snapshot()
    assert (again["sampled_tokens"], again["trained_tokens"]) == (400, 300)
    assert again["trainer_busy_hours"] == row["trainer_busy_hours"] > 0


def spend(folder):
    """A run that has spent something, with a row of each kind beside its ledger; returns the last row's columns."""
    clock = Clock()
    ledger = make(folder / "ledger.json", clock)
    ledger.begin()
    with ledger.trainer("busy"):
        clock.now += 40
    ledger.trained([18, 26])
    ledger.finished(prompt_tokens=7, completion_tokens=[11, 19])
    ledger.observe("a", counters(up=40, busy=30, sampled=280, forced=20, prefill=70))
    evaluation = {"step": 0, "pass_rate": 0.5, **ledger.snapshot()}
    clock.now += 5
    ledger.observe("a", counters(up=45, busy=34, sampled=320, forced=20, prefill=77), evaluating=True)
    row = ledger.snapshot()
    (folder / "evals.jsonl").write_text(json.dumps(evaluation) + "\n")
    torn = '{"step": 2, "compute": {"device_hours": 9'
    broken = json.dumps({"step": 3, "compute": {**row, "device_hours": None, "generator_busy_hours": 1e12}})
    (folder / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, 'compute': row})}\n{broken}\n\x00\xff[]\n{torn}")
    return row


def changed(path, change):
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))


BREAKS = {
    "not JSON": lambda path: path.write_text("{"),
    "empty": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(b"\xff\x00{"),
    "a list": lambda path: path.write_text("[]"),
    "NaN": lambda path: changed(path, lambda saved: saved["seconds"].update(generator_busy=float("nan"))),
    "infinity": lambda path: changed(path, lambda saved: saved["trainer"].update(flops=float("inf"))),
    "negative": lambda path: changed(path, lambda saved: saved["sampled"].update(training=-1)),
    "absurd": lambda path: changed(path, lambda saved: saved["seconds"].update(generator_busy=1e12)),
    "a key less": lambda path: changed(path, lambda saved: saved.pop("decoded")),
    "a class less": lambda path: changed(path, lambda saved: saved["seconds"].pop("trainer_idle")),
    "a string": lambda path: changed(path, lambda saved: saved["estimated"].update(training="1")),
    "a server": lambda path: changed(path, lambda saved: saved["servers"].update(b=[1, float("nan"), 0, 0, 0, 0])),
    "short sums": lambda path: changed(path, lambda saved: saved["finished"].update(training=[1, 2, 3])),
}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS.keys())
def test_a_broken_ledger_is_made_again_from_the_rows(tmp_path, caplog, broken):
    before = spend(tmp_path)
    path = tmp_path / "ledger.json"
    broken(path)
    clock = Clock(now=7.0)
    ledger = make(path, clock)
    assert ledger.snapshot() == pytest.approx(before)
    (said,) = [record.message for record in caplog.records]
    assert "step 1 of metrics.jsonl" in said and "\n" not in said and str(path) in said
    assert (tmp_path / "ledger.json.broken").exists()
    # And it goes on from there: FLOPs of new tokens are added to those recovered.
    ledger.begin()
    clock.now += 3
    ledger.observe("b", counters(up=1, busy=1, sampled=10))
    after = ledger.snapshot()
    assert after["generator_flops"] == pytest.approx(
        before["generator_flops"] + SHAPE.forward_flops(tokens=10, context=0)
    )
    assert after["sampled_tokens"] == before["sampled_tokens"] + 10
    assert make(path, Clock()).snapshot() == after  # whole again


def test_a_repaired_ledger_outlives_a_start_that_is_interrupted(tmp_path, monkeypatch):
    before = spend(tmp_path)
    path = tmp_path / "ledger.json"
    path.write_text("{")

    def interrupted(ledger):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(path, Clock())
    assert make(path, Clock()).snapshot() == pytest.approx(before)  # it is broken as before, not gone
    path.write_text("{")
    make(path, Clock())  # interrupted behind it, before anything was booked
    assert read(str(path)) and (tmp_path / "ledger.json.broken").read_text() == "{"


def test_a_broken_ledger_without_rows_says_what_to_do(tmp_path):
    path = tmp_path / "ledger.json"
    make(path, Clock()).save()
    path.write_text("{")
    with pytest.raises(ValueError, match=r"is broken .it is not JSON.*move the file away to count from zero") as error:
        make(path, Clock())
    assert "\n" not in str(error.value) and path.exists()


def test_a_ledger_of_an_older_trainer_is_read(tmp_path):
    before = spend(tmp_path)
    path = tmp_path / "ledger.json"
    changed(path, lambda saved: [saved.pop(name) for name in ("recovered", "heard")])
    changed(path, lambda saved: [saved["seconds"].pop(f"{side}_stalled") for side in ("trainer", "generator")])
    assert make(path, Clock()).snapshot() == before


def test_the_rows_of_an_older_trainer_are_read(tmp_path):
    """Where its ledger is broken: they know no stalls."""
    before = spend(tmp_path)
    path = tmp_path / "ledger.json"
    path.write_text("{")
    row = {"step": 1, "compute": {name: value for name, value in before.items() if "stalled" not in name}}
    assert len(row["compute"]) == len(before) - 2
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert make(path, Clock()).snapshot() == pytest.approx(before)


def test_what_is_not_known_to_be_true_is_not_booked(clock, ledger):
    clock.now += 10
    ledger.observe("a", counters(up=10, busy=8, sampled=100))
    before = ledger.snapshot()
    ledger.observe("a", counters(up=9e5, busy=8e5, sampled=10**9), from_here=True)
    assert ledger.snapshot() == before
    clock.now += 1
    ledger.observe("a", counters(up=9e5 + 1, busy=8e5 + 1, sampled=10**9 + 50))
    assert ledger.snapshot()["sampled_tokens"] == before["sampled_tokens"] + 50


def test_no_process_is_booked_for_more_time_than_it_was_up(clock, ledger):

    def booked():
        row = ledger.snapshot()  # device-seconds, of two devices
        return row["generator_busy_hours"] * 3600, row["generator_idle_hours"] * 3600

    clock.now += 1
    ledger.observe("a", counters(up=0.5, busy=120))
    assert booked() == pytest.approx((1, 0))
    clock.now += 1
    ledger.observe("a", counters(up=1.5, busy=240))
    assert booked() == pytest.approx((3, 0))
    # An honest one whose step of 10 s has ended: what was idle stays so, and the rest of it is busy from here on.
    clock.now += 20
    ledger.observe("b", counters(up=9, busy=0))
    clock.now += 2
    ledger.observe("b", counters(up=11, busy=10))
    clock.now += 20
    ledger.observe("b", counters(up=31, busy=10))
    assert booked() == pytest.approx((3 + 2 * 10, 2 * 21))


def test_a_server_claims_more_than_the_time_between_two_trainers(tmp_path, clock, ledger):
    clock.now += 10
    for server in ("honest", "liar"):
        ledger.observe(server, counters(up=10, busy=8, sampled=100))
    ledger.save()
    ledger = make(tmp_path / "l", Clock(), wall=6000.0)
    ledger.begin()
    ledger.observe("honest", counters(up=1010, busy=408, sampled=500))
    ledger.observe("liar", counters(up=5010, busy=5008, sampled=50_000))
    row = ledger.snapshot()
    assert row["sampled_tokens"] == 2 * 100 + 400
    assert row["generator_busy_hours"] * 3600 == pytest.approx(2 * (2 * 8 + 400))


def test_nothing_that_is_not_finite_is_written(tmp_path, ledger):
    ledger.save()
    before = (tmp_path / "l").read_text()
    ledger.observe("a", counters(up=1, busy=float("nan"), sampled=1))
    with pytest.raises(ValueError, match="not JSON compliant"):
        ledger.save()
    assert (tmp_path / "l").read_text() == before


def test_a_number_larger_than_any_float_is_named(tmp_path):
    path = tmp_path / "ledger.json"
    make(path, Clock()).save()
    saved = json.loads(path.read_text())
    saved["trainer"]["flops"] = 10**400
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"^trainer\.flops is 10{39}$"):
        read(str(path))
