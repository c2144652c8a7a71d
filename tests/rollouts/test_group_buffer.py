"""What a process delivered is taken back: of groups open, finished and handed out, once, and under the same names."""

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.contract.codec import Completion, CompletionRequest
from scalerl_jax.environments.base import RIGHT, WRONG, Row
from scalerl_jax.environments.episode import AgentRun, Reply, Trajectory
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight, Process, RolloutRequest, TurnRequest, finished
from scalerl_jax.rollouts.pacing import Pacing, Phased, Pipeline
from tests.rollouts.simulator import Faults, Simulation

SIZE = 2


PIPELINE = Pipeline(k=2, groups=2, batches=3)


def make(
    pacing: Pacing = PIPELINE, *, agents: int = 1, of_agents: bool = False, prompts: int | None = None
) -> GroupBuffer:
    """of_agents: each group's completions are agents' runs. prompts: how many there are; None: no end of them."""

    def open_group(number: int) -> GroupInFlight:
        if number == prompts:
            raise ValueError("no prompt is left")
        requests = tuple(CompletionRequest(i, i) for i in range(SIZE))
        return GroupInFlight(number, f"train/{number}", Row("", agent=of_agents), requests)

    return GroupBuffer(pacing=pacing, open_group=open_group, group_size=SIZE, trained=0, agents=agents)


def ask(buffer: GroupBuffer, server: str, *, room: int = SIZE, alone: bool = False) -> RolloutRequest | None:
    return buffer.request(Process(server, "1"), step=0, capacity=room, split=True, alone=alone, now=0.0)


def deliver(buffer: GroupBuffer, request: RolloutRequest, *, scored: bool = True) -> list[Trajectory]:
    made = []
    for index in sorted(request.left):
        ids, logprobs = np.ones(2, np.int32), np.zeros(2, np.float32)
        group_id = request.group.group_id
        completion = Completion(1, group_id, index, ids, logprobs, ((0, 0, 2),), (), "stop")
        made.append(buffer.arrived(request, completion))
        assert made[-1].completion is completion
        if scored:
            buffer.scored(request.group, made[-1], RIGHT, now=1.0)
    return made


A, B = Process("a:1", "1"), Process("b:2", "1")


def test_a_batch_handed_out_waits_again_and_comes_again_in_order():
    buffer = make()
    for server in ("a:1", "b:2", "b:2"):
        deliver(buffer, ask(buffer, server))
    open_ones = ask(buffer, "a:1", room=1)
    deliver(buffer, open_ones, scored=False)
    first = buffer.pop_batch(0)
    assert [group.number for group in first] == [0, 1]
    assert finished(first[0]).servers == ((((A, 2),),), (((A, 2),),))

    assert buffer.retract(A) == 3
    assert buffer.pop_batch(0) is None and [group.number for group in buffer.missing(0)] == [0]
    assert sorted(buffer.ready) == [1, 2] and list(buffer.in_flight) == [0, 3]
    again = ask(buffer, "b:2")
    assert (again.group.number, again.left) == (0, {0, 1})  # the same names
    assert ask(buffer, "a:1").group.number != 0
    deliver(buffer, again)
    second = buffer.pop_batch(0)
    assert [group.number for group in second] == [0, 1]
    assert {part.process for group in second for ((part,),) in finished(group).servers} == {B}
    buffer.trained_to(1)
    assert buffer.retract(B) == 2  # of group 2: what has been trained stays
    assert [group.number for group in second if group.delivered() == SIZE] == [0, 1]


def test_only_some_groups_are_taken_back():
    buffer = make()
    for _ in range(2):
        deliver(buffer, ask(buffer, "a:1"))
    buffer.pop_batch(0)
    assert buffer.retract(A, {1}) == SIZE
    assert sorted(buffer.ready) == [0] and list(buffer.in_flight) == [1]
    # Somebody else first; where there is nobody else, the same one again.
    assert ask(buffer, "a:1").group.number == 2
    assert ask(buffer, "a:1", alone=True).group.number == 1


def test_nothing_taken_back_changes_nothing():
    buffer = make()
    for _ in range(2):
        deliver(buffer, ask(buffer, "a:1"))
    buffer.pop_batch(0)
    assert buffer.retract(B) == 0
    assert not buffer.in_flight and not buffer.ready
    buffer.trained_to(1)


def test_a_score_of_what_was_taken_back_changes_nothing():
    buffer = make()
    request = ask(buffer, "a:1")
    (old, _) = deliver(buffer, request, scored=False)
    assert buffer.retract(A) == 2
    new, other = deliver(buffer, ask(buffer, "b:2"), scored=False)
    assert not buffer.scored(request.group, old, WRONG, now=1.0)
    assert not request.group.scores
    assert not buffer.scored(request.group, new, RIGHT, now=1.0)
    assert buffer.scored(request.group, other, RIGHT, now=1.0)
    assert request.group.scores == {0: RIGHT, 1: RIGHT}


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 4),
    groups=st.integers(1, 4),
    servers=st.integers(1, 3),
    phased=st.booleans(),
    turns=st.integers(1, 4),
    agents=st.booleans(),
)
def test_whatever_is_taken_back_every_group_is_trained_once(seed, k, groups, servers, phased, turns, agents):
    common = {"k": k, "groups": groups, "batches": 9}
    simulation = Simulation(
        pacing=Phased(**common) if phased else Pipeline(**common),
        seed=seed,
        slots=[4] * servers,
        chunk_seconds=[0.1] * servers,
        update_seconds=0.3,
        push_seconds=0.1,
        faults=Faults(death=0.03, hang=0.02, refuse=0.1, lie=0.6),
        turns=turns,
        agents=agents,
    )
    simulation.run()
    numbers = [group.number for batch in simulation.trained for group in batch]
    assert numbers == list(range(9 * groups)) == simulation.drawn
    for group in (group for batch in simulation.trained for group in batch):
        made = finished(group)
        assert [c.index for c in made.completions] == [0, 1] and len(made.scores) == len(made.servers) == 2
        assert [len(c.branches) for c in made.completions] == list(map(len, made.servers))
    assert max(simulation.lags()) <= k
    assert not simulation.buffer.in_flight and not simulation.buffer.ready


def test_an_agent_of_which_a_turn_is_taken_back_begins_again():
    buffer = make(agents=3, of_agents=True)
    assert ask(buffer, "a:1") is None  # a group of agents asks for nothing itself
    (group, first), (_, second) = buffer.start_agents()
    assert ask(buffer, "a:1") is None and not buffer.start_agents()  # two more would be four
    assert group.delivered() == 0 and not buffer.stored()

    def call(run: AgentRun, name: str, after: Process | None = None) -> Future:
        answer: Future = Future()
        buffer.add_call(
            group, TurnRequest(run, "session", after, None, answer), Row(""), name, CompletionRequest(run.index, 9)
        )
        return answer

    answers = [call(first, "0/0"), call(first, "0/1"), call(second, "1/0", after=B)]
    assert buffer.pending() == 3
    asked = [ask(buffer, "a:1") for _ in range(2)]
    assert [request.group.group_id for request in asked] == ["train/0/0/0", "train/0/0/1"]
    assert buffer.request(A, step=0, capacity=2, split=True, alone=False, now=0.0, with_capacity={A: 0, B: 0}) is None
    assert turn(buffer, asked[0], 5, 6) is None and answers[0].result()[1] == A
    buffer.returned(asked[1])
    assert buffer.pending() == 2

    assert buffer.retract(A) == 1 and not buffer.runs(group, first) and buffer.runs(group, second)
    assert not answers[1].done() and call(first, "0/2").cancelled()  # whoever runs it ends it
    ((again, third),) = buffer.start_agents()
    assert again is group and third.index == 0 and buffer.pending() == 1
    answers[2].cancel()
    assert ask(buffer, "b:2") is None and not buffer.pending()  # nobody waits for it


def test_what_was_trained_cannot_be_trained_again():
    buffer = make()
    for _ in range(2):
        deliver(buffer, ask(buffer, "a:1"))
    buffer.pop_batch(0)
    with pytest.raises(AssertionError):
        buffer.trained_to(2)


def test_a_phase_whose_prompts_run_out_ends_with_the_last_batch_that_is_whole():
    buffer = make(Phased(k=2, groups=2, batches=4), prompts=3)
    requests = [ask(buffer, "a:1") for _ in range(3)]
    assert ask(buffer, "a:1") is None and buffer.pop_batch(0) is None  # the phase's last groups are in flight
    for request in requests:
        deliver(buffer, request)
    assert [group.number for group in buffer.pop_batch(0)] == [0, 1]
    buffer.trained_to(1)
    with pytest.raises(ValueError, match="no prompt is left"):
        buffer.pop_batch(1)


def turn(buffer: GroupBuffer, request: RolloutRequest, *tokens: int, step: int = 0) -> Trajectory | None:
    """A turn of the request's one completion, by version `step`."""
    (index,) = request.left
    logprobs = np.full(len(tokens), -0.5, np.float32)
    versions = ((step, 0, len(tokens)),)
    return buffer.arrived(
        request, Completion(1, "a turn", index, np.array(tokens, np.int32), logprobs, versions, (), "stop")
    )


def test_turns_and_replies_become_one_completion():
    buffer = make()
    first, other = ask(buffer, "a:1", room=1), ask(buffer, "a:1", room=1)
    assert first.group is other.group and (first.left, other.left) == ({0}, {1})
    trajectory = turn(buffer, first, 5, 6)
    assert first.group.delivered() == 1 and not first.group.pending
    buffer.replied(first.group, trajectory, Reply(np.array([7, 8, 9], np.int32)))
    again = ask(buffer, "b:2")
    assert (again.group, again.left, again.trajectory, again.minimum_step) == (first.group, {0}, trajectory, 0)
    assert turn(buffer, again, 10, step=1) is trajectory
    assert not buffer.scored(first.group, trajectory, RIGHT, now=1.0)
    assert buffer.scored(first.group, turn(buffer, other, 11, 12), WRONG, now=2.0)

    made = finished(first.group)
    assert made.servers == ((((A, 2), (A, 5), (B, 6)),), (((A, 2),),))
    whole = made.completions[0]
    assert (whole.token_ids.tolist(), whole.versions) == ([5, 6, 7, 8, 9, 10], ((0, 0, 5), (1, 5, 6)))
    assert whole.sampled().tolist() == [True, True, False, False, False, True]
    assert whole.logprobs.tolist() == [-0.5, -0.5, 0, 0, 0, -0.5]
    assert (whole.replies, whole.interrupted, whole.group_id) == (((2, 5),), False, "a turn")


def test_another_turn_is_asked_for_alone_and_before_the_other_completions():
    buffer = make()
    trajectory = turn(buffer, ask(buffer, "a:1", room=1), 5)
    group = next(iter(buffer.in_flight.values()))
    buffer.replied(group, trajectory, Reply(np.array([7], np.int32)))
    assert group.pending == {0, 1}
    assert (ask(buffer, "a:1").left, ask(buffer, "a:1").left) == ({0}, {1})


def test_an_episode_of_which_a_turn_is_taken_back_begins_again():
    buffer = make()
    requests = [ask(buffer, "a:1", room=1) for _ in range(2)]
    group = requests[0].group
    trajectories = [turn(buffer, request, 5) for request in requests]
    for trajectory in trajectories:
        buffer.replied(group, trajectory, Reply(np.array([7], np.int32)))
    elsewhere = ask(buffer, "b:2", room=1)
    assert buffer.retract(A) == 2
    # One waits for its next turn, the other's is being sampled: that comes to nothing.
    assert group.pending == {1} and list(group.asked) == [0]
    assert turn(buffer, elsewhere, 6) is None
    assert group.pending == {0, 1} and not group.asked and not group.trajectories
    buffer.replied(group, trajectories[1], Reply(np.array([8], np.int32)))  # nor does a reply that is late
    assert not buffer.scored(group, trajectories[0], RIGHT, now=1.0)
    fresh = ask(buffer, "b:2")
    assert fresh.trajectory is None and fresh.left == {0, 1} and not group.trajectories


def test_a_turn_is_left_to_the_process_that_has_its_keys_and_values():
    buffer = make()
    trajectory = turn(buffer, ask(buffer, "a:1", room=1), 5)
    group = next(iter(buffer.in_flight.values()))
    turn(buffer, ask(buffer, "a:1", room=1), 5)
    buffer.replied(group, trajectory, Reply(np.array([7], np.int32)))

    def wanted(server: str, with_capacity: dict[Process, int]) -> list[int]:
        return buffer._wanted(group, Process(server, "1"), with_capacity)

    assert wanted("a:1", {A: 0, B: 0}) == [0] and not wanted("b:2", {A: 0, B: 0})
    assert wanted("b:2", {B: 0}) == [0], "it has no room"
    assert wanted("b:2", {Process("a:1", "2"): 0, B: 0}) == [0], "it has been started again"
    other = buffer.request(B, step=0, capacity=1, split=True, alone=False, now=0.0, with_capacity={A: 0, B: 0})
    assert other.group is not group, "the next group is asked for meanwhile"
    buffer.trained, group.number = 3, 6  # which is of the last batch: version 1 at least
    assert wanted("b:2", {A: 0, B: 1}) == [0], "it holds weights that are too old"
    group.number, group.failed_at = 0, A.address
    assert wanted("b:2", {A: 0, B: 0}) == [0], "it did not deliver the last time"
