"""Evaluations: every token of one version, the same request each time, training goes on where servers are left."""

import concurrent.futures

import pytest

from scalerl_jax.rollouts.evaluation import EvaluationLost
from scalerl_jax.rollouts.evaluator import Evaluator
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers.discovery import Servers
from scalerl_jax.rollouts.servers.validate_status import Expected
from tests.rollouts.small_trainer import VOCABULARY, ByteTokenizer, Trainer, config, row, score, weights
from tests.support.waiting import eventually

HELD_OUT = [row(5000 + i) for i in range(12)]
SAMPLES = 3
BRISK = {"token_seconds": 0.004, "mean_tokens": 12.0}
LAST = HELD_OUT[-1].index


def check(groups, version: int) -> None:
    assert [group.row.index for group in groups] == [p.index for p in HELD_OUT]
    for group in groups:
        assert len(group.completions) == SAMPLES
        for index, completion in enumerate(group.completions):
            assert (completion.group_id, completion.index) == (f"eval/{version}/{group.row.index}", index)
            assert set(completion.token_steps().tolist()) == {version}
            assert group.scores[index] == score(group.row, completion)


def evaluating(trainer: Trainer) -> list[str]:
    return [address for address, s in trainer.fleet.status()["servers"].items() if s["evaluating"]]


def hold_back(servers, version: int) -> None:
    """The evaluation of `version` does not end before `let_go`, however long the test takes over what it does."""
    for server in servers:
        server.hold_back(f"eval/{version}/{LAST}")


def let_go(servers) -> None:
    for server in servers:
        server.let_go()


def half_way(trainer: Trainer) -> bool:
    """Whether some prompts of an evaluation that is held back are finished."""
    evaluation = trainer.fleet.status()["evaluation"]
    return evaluation is not None and evaluation["ready"] > 0


def test_one_server_evaluates_while_the_others_train(start):
    servers = start(BRISK, BRISK, BRISK)
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        for _ in range(3):
            trainer.update()
        hold_back(servers, 3)
        future = trainer.fleet.evaluate(3, HELD_OUT, SAMPLES)
        (evaluator,) = eventually(lambda: evaluating(trainer))

        def observed() -> bool:
            return {evaluating for _, evaluating in trainer.observed} == {True, False}

        # Training goes on, and the versions do not reach the evaluating server.
        while trainer.version < 6 or not (half_way(trainer) and observed()):
            trainer.update()
            status = trainer.fleet.status()["servers"][evaluator]
            assert status["step"] <= 3 and evaluating(trainer) == [evaluator]
        assert status["step"] == 3
        let_go(servers)
        while not future.done():
            assert evaluating(trainer) in ([evaluator], [])
            trainer.update()
        check(future.result(), 3)
        eventually(lambda: trainer.fleet.status()["servers"][evaluator]["step"] == trainer.version)
        trainer.update()
        trainer.check()


def test_all_servers_evaluate_and_training_waits(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(evaluation_servers=0, max_steps=6), servers) as trainer:
        trainer.admit_all()
        hold_back(servers, 0)
        first = trainer.fleet.evaluate(0, HELD_OUT, SAMPLES)
        assert sorted(evaluating(trainer)) == sorted(s.address for s in servers)
        let_go(servers)
        while trainer.version < 6:
            trainer.update()
        last = trainer.fleet.evaluate(6, HELD_OUT, SAMPLES)
        check(trainer.fleet.result(first, trainer.wait), 0)
        check(trainer.fleet.result(last, trainer.wait), 6)
        trainer.check()


def test_a_version_within_a_phase_is_sent_to_be_evaluated_only(start):
    (server,) = start({})
    with Trainer(config(pacing_kind="phased", pacing_max_off_policy_steps=4), [server]) as trainer:
        versions = []
        for version in range(1, 9):
            trainer.update()
            if version in (3, 4):
                check(trainer.fleet.result(trainer.fleet.evaluate(version, HELD_OUT, SAMPLES), trainer.wait), version)
            versions.append(server.held()[0].step)
        assert versions[1] == 0  # the frozen one
        assert versions[2:6] == [3, 4, 4, 4]
        trainer.check()
        steps = [{int(s) for g in groups for c in g.completions for s in c.token_steps()} for groups in trainer.batches]
        assert steps == [{0}] * 4 + [{4}] * 4


@pytest.mark.parametrize("samples", [16, 25])
def test_a_prompt_has_more_samples_than_a_group_has_completions(start, samples):
    """16 fill the queue of the server, 25 are more than fit in it, in its slots and in its queue together."""
    with Trainer(config(), start({})) as trainer:
        groups = trainer.fleet.result(trainer.fleet.evaluate(0, HELD_OUT[:3], samples), trainer.wait)
        assert [[c.index for c in group.completions] for group in groups] == [list(range(samples))] * 3
        trainer.update()


def test_evaluations_queue_up_and_keep_their_versions(start):
    (server,) = start(BRISK)
    with Trainer(config(), [server]) as trainer:
        futures = []
        for version in range(3):
            futures.append(trainer.fleet.evaluate(version, HELD_OUT, SAMPLES))
            trainer.update()
        for version, future in enumerate(futures):
            check(trainer.fleet.result(future, trainer.wait), version)
        trainer.check()


@pytest.mark.parametrize("evaluators", [1, 2])
def test_the_queue_may_be_far_behind_the_training(start, evaluators):
    """A server goes from one evaluation to the next, past no version that is still to be evaluated."""
    servers = start(BRISK, BRISK, BRISK)
    with Trainer(config(evaluation_servers=evaluators, fleet_silence_seconds=1.0), servers) as trainer:
        trainer.admit_all()
        hold_back(servers, 0)
        futures = []
        while trainer.version < 6:
            if trainer.version in (0, 2, 3):
                futures.append(trainer.fleet.evaluate(trainer.version, HELD_OUT, SAMPLES))
            trainer.update()
        assert len(evaluating(trainer)) == evaluators
        let_go(servers)
        for version, future in zip((0, 2, 3), futures):
            check(trainer.fleet.result(future, trainer.wait), version)
        trainer.update()
        trainer.check()


def test_an_evaluating_server_that_dies_is_replaced(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        trainer.update()
        hold_back(servers, 1)
        future = trainer.fleet.evaluate(1, HELD_OUT, SAMPLES)
        (evaluator,) = eventually(lambda: evaluating(trainer))
        eventually(lambda: half_way(trainer))
        server = next(s for s in servers if s.address == evaluator)
        server.kill()
        let_go(servers)
        check(trainer.fleet.result(future, trainer.wait), 1)
        assert evaluator not in evaluating(trainer)
        trainer.update()
        trainer.check()


def test_the_only_server_dies_while_it_evaluates_and_comes_back(start):
    (server,) = start(BRISK)
    with Trainer(config(), [server]) as trainer:
        trainer.update()
        hold_back([server], 1)
        future = trainer.fleet.evaluate(1, HELD_OUT, SAMPLES)
        eventually(lambda: half_way(trainer))
        server.kill()
        server.let_go()
        server.start()
        server.wait()
        check(trainer.fleet.result(future, trainer.wait), 1)
        assert len(trainer.admitted) == 2
        trainer.update()
        trainer.check()


def test_an_evaluation_beyond_saving_says_so(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(fleet_silence_seconds=1.0), servers) as trainer:
        trainer.admit_all()
        hold_back(servers, 0)
        future = trainer.fleet.evaluate(0, HELD_OUT, SAMPLES)
        (evaluator,) = eventually(lambda: evaluating(trainer))
        server, other = sorted(servers, key=lambda s: s.address != evaluator)
        trainer.update()
        eventually(lambda: trainer.fleet.status()["servers"][other.address]["step"] == 1)
        server.kill()
        with pytest.raises(EvaluationLost, match="version 0"):
            trainer.fleet.result(future, trainer.wait)
        check(trainer.fleet.result(trainer.fleet.evaluate(1, HELD_OUT, SAMPLES), trainer.wait), 1)


def test_every_evaluation_asks_for_the_same(start):
    """The thinking budget of a prompt's i-th sample is where it is interrupted, if it is, at every evaluation."""
    with Trainer(config(), start({})) as trainer:
        places = []
        for version in range(2):
            groups = trainer.fleet.result(trainer.fleet.evaluate(version, HELD_OUT, SAMPLES), trainer.wait)
            check(groups, version)
            completions = [(g.row.index, c) for g in groups for c in g.completions if c.forced]
            places.append({(index, c.index): c.forced[0][0] for index, c in completions})
            trainer.update()
        both = places[0].keys() & places[1].keys()
        assert len(both) > 5
        assert all(places[0][name] == places[1][name] for name in both)


def test_an_evaluator_ends_by_what_its_wait_raises(start):
    """As that of local servers of which one cannot be restarted."""
    servers, made, lines = start(BRISK), config(), []
    hold_back(servers, 0)

    def wait(line: str) -> None:
        assert len(lines) < 2, "it went on"
        lines.append(line)
        if len(lines) == 2:
            raise RuntimeError("server 0 cannot be restarted")

    with concurrent.futures.ThreadPoolExecutor(1) as scorers:
        evaluator = Evaluator(
            made,
            Servers([server.address for server in servers], probe_prompts=HELD_OUT, vocabulary=VOCABULARY),
            expected=Expected("replay", "{}", "float32"),
            requests=Requests(made, ByteTokenizer()),
            score=lambda row, completion: scorers.submit(score, row, completion),
            wait=wait,
            take_over=True,
        )
        with evaluator, pytest.raises(RuntimeError, match="cannot be restarted"):
            list(evaluator.evaluate(weights(0), HELD_OUT))
    let_go(servers)
