"""What happens when trainer and servers meet: newcomers, the probe, and the ways in which it can be refused."""

import time

import numpy as np
import pytest

from rollout_server.contract import rollout_pb2 as pb
from scalerl_jax.rollouts.fleet import FleetError
from scalerl_jax.rollouts.probe import LIMITS, Expected, ProbeError, compare, mismatch
from tests.rollouts.helpers import Trainer, config, eventually, weights


def test_nobody_listens(start):
    (server,) = start({})
    server.reserve()
    trainer = Trainer(config(fleet_connect_seconds=0.5), [server])
    with pytest.raises(FleetError) as error:
        trainer.fleet.start(0)
    assert server.address in str(error.value)
    assert "scalerl-serve" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_given_twice_or_none():
    with pytest.raises(FleetError, match="no rollout server is given"):
        Trainer(config(), [])


def test_a_server_that_starts_late_gets_the_current_weights_before_any_group(start):
    servers = start({}, {})
    late = servers[1].reserve()
    with Trainer(config(pacing_store_batches=2.0), servers) as trainer:
        for _ in range(4):
            trainer.update()
        late.launch()
        late.wait()
        version, tensors = eventually(lambda: late.held() if late.held()[1] else None)
        assert version.step == trainer.version
        for name, tensor in weights(trainer.version).items():
            np.testing.assert_array_equal(tensors[name].view(np.uint32), tensor.view(np.uint32))
        # Held back until the trainer has looked at what it sampled.
        (newcomer,) = eventually(trainer.fleet.newcomers)
        assert newcomer.server == late.address
        assert len(newcomer.samples) == trainer.config.probe.completions
        assert all(set(c.token_steps()) == {trainer.version} for _, c in newcomer.samples)
        assert any(c.forced for _, c in newcomer.samples)
        status = trainer.fleet.status()["servers"][late.address]
        assert (status["state"], status["in_flight"]) == ("newcomer", 0)
        trainer.update()
        assert late.address in trainer.admitted
        trainer.update()
        trainer.check()


def test_the_trainer_that_never_waits_still_meets_newcomers(start):
    """Batches lie ready all the time; the newcomer always holds the version before, were it not waited for."""
    servers = start({}, {"token_seconds": 0.005})
    late = servers[1].reserve()
    with Trainer(config(pacing_store_batches=3.0), servers) as trainer:
        trainer.update()
        late.launch()
        while late.address not in trainer.admitted:
            time.sleep(0.05)  # the update
            trainer.update()
        trainer.check()


def test_another_tokenizer_stops_the_run(start):
    trainer = Trainer(config(), start({"fingerprint": "another tokenizer's"}))
    with pytest.raises(ProbeError, match=r"its tokenizer .another toke. is not the trainer's .replay."), trainer:
        trainer.update()


def test_other_log_probs_stop_the_run(start):
    def score(samples):
        return [completion.logprobs + 0.05 for _, completion in samples]

    with Trainer(config(), start({}), score=score) as trainer:
        with pytest.raises(ProbeError, match=r"differ from the trainer's by 0\.05 on average"):
            trainer.update()


def test_a_later_server_of_another_kind_is_turned_away(start):
    servers = start({}, {})
    late = servers[1].reserve()
    with Trainer(config(), servers) as trainer:
        trainer.update()
        late.launch(fingerprint="another")
        eventually(lambda: trainer.states()[late.address] == "rejected")
        trainer.update()
        # The right one on the same port is welcome.
        late.kill()
        late.launch(fingerprint="replay")
        trainer.update_until(lambda: late.address in trainer.admitted)
        trainer.check()


def test_a_trainer_started_anew_takes_the_servers_over(start):
    (server,) = start({"token_seconds": 0.002})
    first = time.time_ns()
    second = first + 1
    with Trainer(config(), [server], incarnation=first) as old:
        for _ in range(4):
            old.update()
        with Trainer(config(), [server], start=2, incarnation=second) as new:
            new.update()
            assert (server.held()[0].incarnation, server.held()[0].step) in [(second, 2), (second, 3)]
            eventually(lambda: old.states()[server.address] == "taken")
            for _ in range(3):
                new.update()
            new.check()
        assert server.held()[0].incarnation == second
        assert "later than this one" in old.fleet.waiting() + str(old.fleet.status())


def test_mismatch_is_over_sampled_tokens_only(start):
    with Trainer(config(), start({})) as trainer:
        newcomer = eventually(trainer.fleet.newcomers)[0]
    samples = [(p.token_ids, c) for p, c in newcomer.samples]
    sampled = sum(int(c.sampled().sum()) for _, c in samples)
    ours = [np.where(c.sampled(), c.logprobs - 0.25, 7.0) for _, c in samples]
    found = mismatch(samples, ours)
    assert found.tokens == sampled
    assert found.mean == pytest.approx(0.25, abs=1e-6)
    assert found.p99 == pytest.approx(0.25, abs=1e-6)
    assert mismatch(samples, [c.logprobs for _, c in samples]).p99 == 0
    ours[0][0] = np.nan
    assert not mismatch(samples, ours).mean <= LIMITS["bfloat16"][0]


def test_another_head_precision_stops_the_run_and_names_the_flag():
    expected = Expected(
        tokenizer_fingerprint="a", model_config="{}", wire_dtype="bfloat16", head_precision="highest", maximum_tokens=9
    )
    known = {"tokenizer_fingerprint": "a", "model_config": "{}", "wire_dtype": "bfloat16", "head_dtype": "float32"}
    status = pb.StatusReply(**known, maximum_tokens=9)
    compare("s:1", status, expected)  # a server that does not tell: what it samples is compared
    status.head_precision = "highest"
    compare("s:1", status, expected)
    status.head_precision = "default"
    with pytest.raises(ProbeError, match=r"its head precision is default.*start it with --head_precision=highest"):
        compare("s:1", status, expected)
    status.head_precision, status.wire_dtype = "highest", "float32"
    with pytest.raises(ProbeError, match=r"its wire dtype is float32.*start it with --wire_dtype=bfloat16"):
        compare("s:1", status, expected)
