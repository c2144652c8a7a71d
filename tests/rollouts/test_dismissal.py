"""A server whose deliveries do not count: they are asked for again elsewhere under the same names, and it is gone."""

import collections

import numpy as np
import pytest

from scalerl_jax.contract.codec import Completion
from scalerl_jax.learner.batch import sums_of
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.parity import FEWEST_TOKENS, LogprobJudge, Parity, Scored
from scalerl_jax.rollouts.servers.client import PROBE_FAILED
from scalerl_jax.rollouts.servers.server_state import Probed
from scalerl_jax.rollouts.servers.validate_status import Expected, FleetError
from tests.rollouts.small_trainer import Trainer, config, row, weights
from tests.rollouts.test_fleet import states_seen
from tests.support.waiting import eventually

BRISK = {"token_seconds": 0.002, "mean_tokens": 12.0}
WHY = "its tokens' mean importance ratio is 1.65"
HELD_OUT = [row(5000 + i) for i in range(12)]


def wait(trainer: Trainer) -> None:
    trainer.admit_all()
    trainer.update()


def processes(groups) -> dict[str, Process]:
    """Who delivered to these groups, by address."""
    return {process.address: process for group in groups for (((process, _),),) in group.servers}


def batch_of_both(trainer: Trainer, servers):
    """The groups of the next batch to which both servers have delivered; those before it are trained."""
    while True:
        groups = trainer.fleet.batch(trainer.version, trainer.wait)
        if set(processes(groups)) == {server.address for server in servers}:
            return groups
        accept(trainer, groups)


def accept(trainer: Trainer, groups) -> None:
    """What Trainer.update does with a batch that counts."""
    trainer.batches.append(groups)
    trainer.version += 1
    trainer.fleet.advance(trainer.version)
    trainer.fleet.publish(trainer.version, lambda version=trainer.version: weights(version))


def names(groups) -> list[tuple[str, int]]:
    return [(c.group_id, c.index) for group in groups for c in group.completions]


def test_what_a_process_delivered_comes_from_another_one(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(), servers) as trainer:
        wait(trainer)
        groups = batch_of_both(trainer, servers)
        liar = processes(groups)[servers[0].address]
        of_it = sum(process == liar for group in groups for (((process, _),),) in group.servers)
        back = trainer.fleet.trust.dismiss(liar, WHY)
        assert back >= of_it > 0  # later groups have some of it, too
        assert trainer.states()[servers[0].address] == "rejected"
        assert WHY in states_seen(trainer, servers[0])[-1][1]

        again = trainer.fleet.batch(trainer.version, trainer.wait)
        assert names(again) == names(groups)
        assert set(processes(again)) == {servers[1].address}
        accept(trainer, again)
        for _ in range(3):
            assert set(processes(trainer.update())) == {servers[1].address}
        trainer.check()
        fields = [fields for kind, fields in trainer.events if kind == "parity"]
        assert fields == [{"server": servers[0].address, "found": WHY, "completions": back, "sent_away": True}]


def test_one_group_is_asked_for_elsewhere_and_the_server_stays(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(), servers) as trainer:
        wait(trainer)
        groups = batch_of_both(trainer, servers)
        liar = processes(groups)[servers[0].address]
        bad = next(
            group for group in groups if any(liar == process for (((process, _),),) in group.servers)
        )  # or only some of its completions
        back = trainer.fleet.trust.dismiss(liar, WHY, {bad.number})
        assert 0 < back <= len(bad.completions)
        again = trainer.fleet.batch(trainer.version, trainer.wait)
        assert names(again) == names(groups)
        for before, after in zip(groups, again):
            if before.number != bad.number:
                assert before.servers == after.servers
        accept(trainer, again)
        trainer.update()
        trainer.check()
        assert trainer.states()[servers[0].address] == "active"


def test_where_the_last_server_is_sent_away_the_run_ends_and_names_it(start):
    servers = start(BRISK)
    with Trainer(config(), servers) as trainer:
        wait(trainer)
        groups = trainer.fleet.batch(trainer.version, trainer.wait)
        (process,) = set(processes(groups).values())

        def go_on() -> None:
            trainer.fleet.trust.dismiss(process, WHY)
            trainer.fleet.batch(trainer.version, trainer.wait)

        with pytest.raises(FleetError, match=rf"turned away; the last one: server {process.address}: {WHY}"):
            go_on()


PHASED = {"pacing_kind": "phased", "pacing_max_off_policy_steps": 3}


def in_mid_phase(trainer: Trainer):
    """The second batch of a phase of three."""
    trainer.admit_all()
    trainer.update()
    return trainer.fleet.batch(trainer.version, trainer.wait)


def test_in_mid_phase_an_evaluation_may_have_brought_every_server_further(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(**PHASED), servers) as trainer:
        groups = in_mid_phase(trainer)
        trainer.fleet.result(trainer.fleet.evaluate(trainer.version, HELD_OUT, 2), trainer.wait)
        eventually(lambda: {s.held()[0].step for s in servers} == {trainer.version})
        assert trainer.fleet.trust.dismiss(groups[0].servers[0][0][0].process, WHY, {groups[0].number}) > 0
        again = trainer.fleet.batch(trainer.version, trainer.wait)
        assert names(again) == names(groups)
        accept(trainer, again)
        trainer.update()
        trainer.update()
        trainer.check()


def test_in_mid_phase_the_only_server_that_has_groups_may_be_sent_away(start):
    """Another one has been met since, and is compared by the version that the trainer has."""
    servers = start(BRISK, BRISK)
    late = servers[1].reserve()
    with Trainer(config(**PHASED), servers) as trainer:
        trainer.update()
        groups = trainer.fleet.batch(trainer.version, trainer.wait)
        late.start()
        eventually(lambda: trainer.states()[late.address] == "candidate")
        assert trainer.fleet.trust.due() == []  # it holds the phase's version
        assert trainer.fleet.trust.dismiss(groups[0].servers[0][0][0].process, WHY) > 0
        again = trainer.fleet.batch(trainer.version, trainer.wait)
        assert names(again) == names(groups)
        assert set(processes(again)) == {late.address}
        accept(trainer, again)
        trainer.update()
        trainer.check()


def test_an_evaluation_counts_when_it_is_approved_of(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(evaluation_servers=0), servers) as trainer:
        trainer.approves = False
        wait(trainer)
        version = trainer.version
        future = trainer.fleet.evaluate(version, HELD_OUT, 3)
        groups = eventually(trainer.fleet.trust.evaluation)
        assert not future.done()
        shown = processes(groups)
        assert set(shown) == {server.address for server in servers}
        trainer.fleet.trust.dismiss(shown[servers[0].address], WHY)
        groups = eventually(trainer.fleet.trust.evaluation)
        assert not future.done()
        assert set(processes(groups)) == {servers[1].address}
        trainer.fleet.trust.approve_evaluation()
        result = trainer.fleet.result(future)
        assert names(result) == names(groups)
        assert [group.row.index for group in result] == [p.index for p in HELD_OUT]
        assert trainer.fleet.trust.evaluation() is None
        trainer.update()
        trainer.check()


def test_servers_that_have_groups_are_probed_beside_them(start):
    servers = start(BRISK, BRISK)
    with Trainer(config(), servers) as trainer:
        wait(trainer)
        trainer.fleet.trust.probe(trainer.fleet.trust.working())
        seen = {}
        while set(seen) != {server.address for server in servers}:
            seen |= {one.process.address: one for one in trainer.fleet.trust.probed()}
            trainer.update()
        for one in seen.values():
            assert len(one.samples) == trainer.config.parity.completions
            pairs = [(asked.token_ids, completion) for asked, completion in one.samples]
            # Those of one version; as many as there are of each, a swap may come at any time.
            whole = [pair for pair in pairs if len(pair[1].versions) == 1]
            by = collections.Counter(completion.versions[0][0] for _, completion in whole)
            version = by.most_common(1)[0][0] if by else 0
            theirs = [completion.logprobs for _, completion in pairs]
            tokens = sum(int(c.sampled().sum()) for _, c in whole if c.versions[0][0] == version)
            if tokens >= FEWEST_TOKENS:
                assert trainer.probe.compare_again(pairs, theirs, version=version) == ""
                assert "differ from the trainer's by 0.5" in trainer.probe.compare_again(
                    pairs, [logprobs - 0.5 for logprobs in theirs], version=version
                )
            assert trainer.probe.compare_again(pairs, theirs, version=10**6) is None  # the trainer went on
        assert trainer.fleet.trust.probed() == []
        trainer.check()


def test_a_server_whose_short_queue_is_kept_full_is_probed(start):
    """Room is made for the probe: it is not counted as refusing it."""
    servers = start({"slots": 2, "queue": 1, "token_seconds": 0.002, "mean_tokens": 12.0})
    with Trainer(config(), servers) as trainer:
        wait(trainer)
        seen = []
        while not seen:
            trainer.fleet.trust.probe(trainer.fleet.trust.working())
            trainer.update()
            seen = trainer.fleet.trust.probed()
        assert len(seen[0].samples) == trainer.config.parity.completions
        record = trainer.fleet._pool.named(servers[0].address).record
        assert not record.counts and not record._refusals[PROBE_FAILED]
        trainer.update()  # it gets groups again
        trainer.check()


class Probes:
    """Two servers of a fleet that the trainer's thread sees; `samples`: what has come, by server."""

    def __init__(self, *processes):
        self.trust = self
        self._processes, self.samples, self.asked = processes, {}, []

    def due(self):
        return []

    def working(self):
        return list(self._processes)

    def probe(self, processes):
        self.asked.append(set(processes))

    def probed(self):
        return [Probed(process, samples) for process, samples in self.samples.items()]

    def evaluation(self):
        return None


def test_each_server_is_probed_until_it_could_be_compared():
    """That one of them could be does not end the tries of the others."""
    made = config(parity_every=10)
    expected = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="float32")

    def score(segments):  # the servers' own log-probs are the policy's
        return [np.full(len(segment.tokens), -1.0, np.float32) for segment in segments]

    a, b = Process("a:1", "1"), Process("b:2", "1")
    fleet = Probes(a, b)
    parity = Parity(made, score=score, expected=expected, fleet=fleet, log=lambda line: None)

    def sampled(version):
        ids, logprobs = np.arange(20, dtype=np.int32), np.full(20, -1.0, np.float32)
        return ((row(1), Completion(1, "probe", 0, ids, logprobs, ((version, 0, 20),), (), "stop")),)

    for version in range(10, 14):
        parity.trained(version)
        # a samples with the trainer's version, b with the one before, as a slow one does; b's come late but once.
        fleet.samples = {a: sampled(version), b: sampled(version - 1)} if version == 10 else {b: sampled(version - 1)}
        parity.attend(version)
    assert fleet.asked == [{a, b}, {b}, {b}]
    fleet.samples = {}
    parity.trained(20)
    parity.attend(20)  # nothing has come: that is no try
    fleet.samples = {b: sampled(21)}
    parity.trained(21)
    parity.attend(21)
    parity.trained(22)
    assert fleet.asked[3:] == [{a, b}, {a, b}, {a}]


def test_a_lying_server_is_found_by_what_it_delivers(start):
    """Over real gRPC: the server's own log-probs against those that it shifts."""
    servers = start({**BRISK, "faults": "shifted_logprobs:60:-0.5"}, BRISK)
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        judge, trained = LogprobJudge(trainer.config.parity, mean_limit=1e-3), 0
        while trainer.states()[servers[0].address] == "active":
            groups = trainer.fleet.batch(trainer.version, trainer.wait)
            places = [(g, i) for g in groups for i in range(len(g.completions))]
            scores = trainer.probe.score([(g.row.token_ids, g.completions[i]) for g, i in places])
            scored = [
                Scored(g.servers[i][0][0].process, g.number, sums_of(g.completions[i], ours))
                for (g, i), ours in zip(places, scores)
            ]
            found = judge.judge(scored)
            for finding in found:
                assert finding.process.address == servers[0].address
                trainer.fleet.trust.dismiss(finding.process, finding.what, finding.numbers)
            if not found:
                judge.accept(scored)
                accept(trainer, groups)
                trained += sum(
                    np.abs(ours - g.completions[i].logprobs)[g.completions[i].sampled()].max() > 1e-3
                    for (g, i), ours in zip(places, scores)
                )
        # A group here has some fifty tokens: of one that lies in part only, too little to be sure.
        assert trained <= 8
        for _ in range(3):
            trainer.update()
        trainer.check()
