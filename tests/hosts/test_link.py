"""The line between hosts: commands in order, replies to whoever asked, and an end that all hear of."""

import signal
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from scalerl_jax.hosts import link
from scalerl_jax.hosts.link import LOST, FirstHost, Frame, JoinError, OtherHost
from tests.support.ports import hold, port_of
from tests.support.processes import SECONDS as ENDS
from tests.support.processes import begin_python
from tests.support.waiting import SECONDS, eventually

GREETING = {"key": "k", "config": "c"}
PATIENCE = link.SILENCE_SECONDS


def quiet(line: str) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def nobody_leaves() -> Iterator[None]:
    """A host that is lost would end this process: none here is, however slow the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "SILENCE_SECONDS", 600.0)
        patch.setattr(link, "leave", lambda line, code: None)
        patch.setenv("http_proxy", "http://127.0.0.1:9")  # for the web: nobody listens there, and none of us asks
        patch.delenv("no_proxy", raising=False)
        yield


@pytest.fixture
def address() -> Iterator[str]:
    with hold("0.0.0.0") as held:
        yield f"127.0.0.1:{port_of(held)}"


@pytest.fixture
def joined(address: str) -> Iterator[tuple[FirstHost, list[OtherHost]]]:
    first = FirstHost(address, 3, greeting=GREETING, welcome=lambda: {"port": 5})
    others = [OtherHost(address, index, greeting=GREETING) for index in (1, 2)]
    first.wait_for_all(quiet)
    assert [other.welcome() for other in others] == [{"port": 5}] * 2
    yield first, others
    first.end("", 0)
    for other in others:
        other.close()


def test_commands_come_in_order_and_replies_to_who_asked(joined) -> None:
    first, others = joined
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    for number in range(50):
        first.send(Frame("do", {"number": number}, {"array": array + number}))
    asked = [first.ask(Frame("say", {"what": index}), to=index) for index in (1, 2)]
    for other in others:
        for number in range(50):
            frame = other.next()
            assert (frame.kind, frame.fields["number"]) == ("do", number)
            np.testing.assert_array_equal(frame.arrays["array"], array + number)
    for other in reversed(others):
        frame = other.next()
        other.reply(frame, {"said": frame.fields["what"]})
    assert [future.result(SECONDS).fields["said"] for future in asked] == [1, 2]


def test_a_reply_that_nobody_waits_for_any_more_changes_nothing(joined) -> None:
    first, (other, _) = joined
    given_up = first.ask(Frame("say"), to=1)
    frame = other.next()
    assert given_up.cancel()
    other.reply(frame, {"said": "late"})
    asked = first.ask(Frame("say"), to=1)
    other.reply(other.next(), {"said": "in time"})
    assert asked.result(SECONDS).fields["said"] == "in time"


def test_some_commands_do_not_wait_for_those_before_them(joined) -> None:
    first, (other, _) = joined
    came = threading.Event()
    other.on("now", lambda frame: came.set())
    first.send(Frame("later"), to=1)
    first.send(Frame("now"), to=1)
    assert came.wait(SECONDS)
    assert other.next().kind == "later"


def test_the_end_is_heard_with_its_code(joined) -> None:
    first, others = joined
    first.end("all is done", 0)
    for other in others:
        frame = other.next()
        assert (frame.kind, frame.fields["line"], frame.fields["code"]) == ("end", "all is done", 0)


@pytest.mark.parametrize(
    ("index", "greeting", "told"),
    [
        (1, {**GREETING, "config": "another"}, "has config another, the first host c"),
        (2, GREETING, "there is a host 2 already, or there are only 2"),
        (0, GREETING, "there is a host 0 already, or there are only 2"),
    ],
)
def test_who_was_started_otherwise_is_turned_away(address: str, index: int, greeting, told: str) -> None:
    first = FirstHost(address, 2, greeting=GREETING, welcome=dict)
    other = OtherHost(address, index, greeting=greeting)
    with pytest.raises(JoinError, match=told):
        first.wait_for_all(quiet)
    with pytest.raises(JoinError, match=told):
        other.welcome()
    other.close()
    first.end("", 2)


def test_a_stranger_does_not_end_the_run(address: str) -> None:
    first = FirstHost(address, 2, greeting=GREETING, welcome=dict)
    stranger = OtherHost(address, 1, greeting={**GREETING, "key": "of another folder"})
    with pytest.raises(JoinError, match="has key"):
        stranger.welcome()
    other = OtherHost(address, 1, greeting=GREETING)
    first.wait_for_all(quiet)
    assert other.welcome() == {}
    first.end("", 0)
    for one in (stranger, other):
        one.close()


@pytest.mark.parametrize("says", [None, b"", b"GET / HTTP/1.1", Frame("hello", {"index": 1}).to_bytes()])
def test_strangers_that_say_nothing_or_nonsense_keep_nobody_out(
    address: str, monkeypatch: pytest.MonkeyPatch, says: bytes | None
) -> None:
    """More of them than the first host has threads."""
    monkeypatch.setattr(link, "HELLO_SECONDS", 0.3)
    first = FirstHost(address, 2, greeting=GREETING, welcome=dict)
    over = threading.Event()

    def words() -> Iterator[bytes]:
        if says is not None:
            yield says
        over.wait()

    with grpc.insecure_channel(address) as channel:
        strangers = [channel.stream_stream("/scalerl.Hosts/Join")(words()) for _ in range(14)]
        eventually(lambda: all(one.done() for one in strangers), "they are sent away")
        monkeypatch.setattr(link, "HELLO_SECONDS", SECONDS)
        other = OtherHost(address, 1, greeting=GREETING)
        first.wait_for_all(quiet)
        assert other.welcome() == {}
        over.set()
    first.end("", 0)
    other.close()


def test_hosts_that_do_not_come_are_named(address: str) -> None:
    first = FirstHost(address, 3, greeting=GREETING, welcome=dict)
    other = OtherHost(address, 1, greeting=GREETING)
    eventually(lambda: 1 in first._lines, "the other is there")
    with pytest.raises(JoinError, match="host 2 of 3 did not come within 1 s"):
        first.wait_for_all(quiet, seconds=1)
    first.end("host 2 did not come", 2)
    other.close()


def test_a_first_host_that_does_not_answer_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ever was at this address: a channel may find the connection of an earlier one that is still closing."""
    monkeypatch.setattr(link, "DIAL_SECONDS", 0.2)
    with pytest.raises(JoinError, match=f"the first host, {address}, did not answer within 0 s"):
        OtherHost(address, 1, greeting=GREETING, seconds=0)


def test_a_port_that_is_taken(address: str) -> None:
    first = FirstHost(address, 2, greeting=GREETING, welcome=dict)
    with pytest.raises(JoinError, match="is taken"):
        FirstHost(address, 2, greeting=GREETING, welcome=dict)
    first.end("", 0)


# Nobody is given up because the machine is busy, but for one that hears of it (SIGUSR1): it has little patience then.
PROGRAM = """
import signal, sys, time
from scalerl_jax.hosts import link
from scalerl_jax.system import signals

address, index, act = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def lose_patience(*_):
    link.SILENCE_SECONDS = 1.5

link.SILENCE_SECONDS = 600.0
if act == "frozen":
    link.FAREWELL_SECONDS = 1.0
else:
    link.FAREWELL_SECONDS = 60.0
signal.signal(signal.SIGUSR1, lose_patience)
with signals.installed():
    signals.be(signals.HOLD)
    if index == 0:
        host = link.FirstHost(address, 2, greeting={"key": "k"}, welcome=dict)
        host.wait_for_all(print)
    else:
        host = link.OtherHost(address, index, greeting={"key": "k"})
        host.welcome()
    print("joined", flush=True)
    if act == "fail":
        host.fail("the disk is full", 2)
        sys.exit(2)
    while not signals.requested():
        time.sleep(0.01)
    if index == 0:
        host.end("saved", 143)
        sys.exit(143)
    print(host.next().fields["line"], flush=True)
    host.close()
    sys.exit(143)
"""


class Host:
    def __init__(self, address: str, index: int, act: str = ""):
        self.process, self._said = begin_python("-c", PROGRAM, address, index, act, errors=True)

    def until_joined(self) -> "Host":
        for line in self._said:
            if line == "joined\n":
                return self
        raise AssertionError("it ended before")

    def end(self) -> tuple[int, str]:
        with self._said:
            return self.process.wait(ENDS), self._said.read()


@pytest.fixture
def two(address: str, request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    hosts = [Host(address, index, getattr(request, "param", "")) for index in (0, 1)]
    yield [host.until_joined() for host in hosts]
    for host in hosts:
        host.process.kill()
        host.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_ends_the_other(two: list[Host], killed: int) -> None:
    two[killed].process.kill()
    code, said = two[1 - killed].end()
    assert code == LOST
    assert link.RESUMES in said and ("the first host" in said if killed == 0 else "host 1 (" in said)


@pytest.mark.slow
@pytest.mark.parametrize("two", ["frozen"], indirect=True)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_host_ends_the_other_and_then_itself(two: list[Host], frozen: int) -> None:
    two[frozen].process.send_signal(signal.SIGSTOP)
    two[1 - frozen].process.send_signal(signal.SIGUSR1)
    code, said = two[1 - frozen].end()
    assert code == LOST and "has not been heard of for" in said
    two[frozen].process.send_signal(signal.SIGCONT)
    code, said = two[frozen].end()
    assert code == LOST and link.RESUMES in said


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_told_to_stop_one_tells_the_first(two: list[Host], told: int) -> None:
    """Where the first is told, it ends the other; where the other is told, the first is asked to stop."""
    two[told].process.terminate()
    code, said = two[0].end()
    assert code == 143
    assert ("is told to stop" in said) == (told == 1)
    code, said = two[1].end() if told == 1 else (143, "saved")
    assert (code, "saved" in said) == (143, True)


def test_a_host_that_fails_ends_all_with_its_line(address: str) -> None:
    first, other = Host(address, 0), Host(address, 1, "fail")
    code, said = first.end()
    assert code == 2 and said.endswith("): the disk is full\n") and "error: host 1 (" in said
    assert other.end()[0] == 2


def test_beats_keep_a_line_that_says_nothing(joined) -> None:
    """Both ends hear of each other though nothing is told, and several times before they would be missed."""
    assert 10 * link.BEAT_SECONDS < PATIENCE
    first, others = joined
    lines = [*first._lines.values(), *(other._line for other in others)]
    before = [line.heard_at for line in lines]
    eventually(lambda: all(line.heard_at > at for line, at in zip(lines, before)), "each has heard a beat")
