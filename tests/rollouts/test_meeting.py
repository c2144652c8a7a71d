"""What happens when trainer and servers meet: candidates, the probe, and the ways in which it can be refused."""

import dataclasses
import time

import jax
import numpy as np
import pytest

from scalerl_jax.config import ParityConfig
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion
from scalerl_jax.model import row_blocks
from scalerl_jax.rollouts.parity import LIMITS, Probe, mismatch
from scalerl_jax.rollouts.servers import client as connection_lib
from scalerl_jax.rollouts.servers.validate_status import Expected, FleetError, ProbeError, compare
from tests.rollouts.liar import Liar
from tests.rollouts.small_trainer import Trainer, config, weights
from tests.support.waiting import eventually


def test_nobody_listens(start):
    (server,) = start({})
    server.reserve()
    trainer = Trainer(config(fleet_connect_seconds=0.5), [server])
    with pytest.raises(FleetError) as error:
        trainer.fleet.start()
    assert server.address in str(error.value)
    assert "scalerl-serve" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_server_given():
    with pytest.raises(FleetError, match="no rollout server is given"):
        Trainer(config(), [])


def test_a_server_that_starts_late_gets_the_current_weights_before_any_group(start, monkeypatch):
    monkeypatch.setattr(connection_lib, "PATIENCE_SECONDS", 150.0)  # the next batch waits for it
    servers = start({}, {})
    late = servers[1].reserve()
    with Trainer(config(pacing_max_buffered_batches=2.0), servers) as trainer:
        for _ in range(4):
            trainer.update()
        late.start()
        late.wait()
        version, tensors = eventually(lambda: late.held() if late.held()[1] else None)
        assert version.step == trainer.version
        for name, tensor in weights(trainer.version).items():
            np.testing.assert_array_equal(tensors[name].view(np.uint32), tensor.view(np.uint32))
        # Held back until the trainer has looked at what it sampled.
        (candidate,) = eventually(trainer.fleet.trust.due)
        assert candidate.process.address == late.address
        assert len(candidate.samples) == trainer.config.parity.completions
        assert all(set(c.token_steps()) == {trainer.version} for _, c in candidate.samples)
        assert any(c.forced for _, c in candidate.samples)
        status = trainer.fleet.status()["servers"][late.address]
        assert (status["state"], status["in_flight"]) == ("candidate", 0)
        trainer.update()
        assert late.address in trainer.admitted
        trainer.update()
        trainer.check()


def test_the_trainer_that_never_waits_still_meets_newcomers(start):
    """Batches lie ready all the time; the candidate always holds the version before, were it not waited for."""
    servers = start({}, {"token_seconds": 0.005})
    late = servers[1].reserve()
    with Trainer(config(pacing_max_buffered_batches=3.0), servers) as trainer:
        trainer.update()
        late.start()
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

    with Trainer(config(), start({}), logprobs=score) as trainer:
        with pytest.raises(ProbeError, match=r"differ from the trainer's by 0\.05 on average"):
            trainer.update()


def test_a_later_server_of_another_kind_is_turned_away(start):
    servers = start({}, {})
    late = servers[1].reserve()
    with Trainer(config(), servers) as trainer:
        trainer.update()
        late.start(fingerprint="another")
        eventually(lambda: trainer.states()[late.address] == "rejected")
        trainer.update()
        # The right one on the same port is welcome.
        late.kill()
        late.start(fingerprint="replay")
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
            eventually(lambda: old.states()[server.address] == "superseded")
            for _ in range(3):
                new.update()
            new.check()
        assert server.held()[0].incarnation == second
        assert "owned by a newer trainer" in old.fleet.waiting() + str(old.fleet.status())


def test_a_trainer_whose_clock_is_behind_takes_the_servers_over(start, caplog):
    """It names itself above what they tell, once, before its first version goes out; the earlier one waits."""
    servers = start({"token_seconds": 0.002}, {"token_seconds": 0.002})
    first, told = time.time_ns(), []
    with Trainer(config(), servers, incarnation=first) as old:
        old.admit_all()
        old.update()
        with Trainer(config(), servers, start=1, incarnation=1000, raised=told.append) as new:
            assert told == [first + 1]
            new.admit_all()
            for _ in range(2):
                new.update()
            new.check()
            for server in servers:
                eventually(lambda server=server: server.held()[0].incarnation == first + 1)
            eventually(lambda: set(old.states().values()) == {"superseded"})
            said = eventually(lambda: [m for m in caplog.messages if m.startswith("every rollout server is lost")])
            assert len(said) == 1 and all(
                f"{s.address}: superseded, owned by a newer trainer" in said[0] for s in servers
            )
            assert str(first) in said[0] and str(first + 1) in said[0]
            # Neither takes them back.
            assert told == [first + 1] and set(new.states().values()) == {"active"}
            old.fleet._begin_wait(old.version)
            assert "2 superseded" in old.fleet.waiting() and servers[0].address in old.fleet.waiting()
    assert {completion.incarnation for groups in new.batches for g in groups for completion in g.completions} == {
        first + 1
    }


def test_a_server_that_comes_later_with_a_newer_trainers_weights_is_left_alone(start):
    servers = start({}, {})
    with Trainer(config(), servers[1:], incarnation=2**62) as gone:
        gone.update()
    with Trainer(config(), servers[:1]) as trainer:
        trainer.update()
        trainer.fleet._thread.call(trainer.fleet._pool.update, [s.address for s in servers])
        eventually(lambda: trainer.states()[servers[1].address] == "superseded")
        trainer.update()
        trainer.check()
        assert "restart the server" in trainer.server(servers[1])["reason"]
        # Which is what helps.
        servers[1].kill()
        servers[1].start()
        trainer.update_until(lambda: servers[1].address in trainer.admitted)


@pytest.mark.parametrize("told", [2**62, 2**63 - 1, 2**64 - 2, 2**64 - 1])
def test_no_name_is_above_the_largest(told):
    """A server that lies about it can be named, and that is all."""
    with Liar() as liar:

        def status(reply):
            reply.version.incarnation = told
            return reply

        liar.status, raised = status, []
        with pytest.raises(FleetError, match=f"rollout server {liar.address} is superseded: owned by a newer trainer"):
            Trainer(config(), [liar], raised=raised.append).fleet.start()
    assert not raised


def test_a_batch_waits_for_newcomers_by_the_clock(start, clock, monkeypatch):
    """However often the trainer looks, or seldom."""
    monkeypatch.setattr(connection_lib, "PATIENCE_SECONDS", 150.0)
    servers = start({}, {})
    with Trainer(config(), servers[:1]) as trainer:
        trainer.update()
        on_loop, fleet = trainer.fleet._thread.call, trainer.fleet
        on_loop(fleet._pool.update, [s.address for s in servers])
        eventually(lambda: trainer.states()[servers[1].address] == "candidate")
        assert all(on_loop(fleet.trust.holds_batch) for _ in range(1000))
        candidate = on_loop(fleet._pool.named, servers[1].address)
        candidate.patience = 150.0
        assert on_loop(fleet.trust.holds_batch)
        clock.ahead += 151.0
        on_loop(fleet.trust.holds_batch)  # the time since the look before is counted
        assert not on_loop(fleet.trust.holds_batch)


def made(versions, *, error: float = 0.0, at: int = 0):
    """(prompt, completion) of 20 tokens by these versions, and the trainer's log-probs: `error` off from token `at`."""
    ids, theirs = np.arange(20, dtype=np.int32), np.full(20, -1.0, np.float32)
    ours = theirs - np.where(np.arange(20) >= at, error, 0.0)
    return (ids[:2], Completion(1, "probe/s:1/0", 0, ids, theirs, versions, (), "stop")), ours


def test_what_was_sampled_across_a_swap_is_not_held_to_the_limits_of_the_meeting():
    """The later version's tokens are sampled with the earlier one's keys and values there."""
    expected = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="float32")
    probe = Probe(ParityConfig(), expected=expected, score=lambda samples: [], dtype="float32")

    def found(*pairs):
        return probe.compare_again([sample for sample, _ in pairs], [ours for _, ours in pairs], version=5)

    across, whole, wrong = (
        made(((4, 0, 4), (5, 4, 20)), error=0.01, at=4),
        made(((5, 0, 20),)),
        made(((5, 0, 20),), error=0.01),
    )
    earlier = made(((4, 0, 20),), error=0.5)
    assert found(across, earlier) is None  # it is tried again later
    assert found(across, whole, earlier) == ""
    assert "by 0.01 on average" in found(across, wrong, earlier)


def test_logits_rounded_to_bfloat16_are_held_to_its_limits():
    """However finely the rest is computed: the two sides' logits may round to neighbours."""
    sample, ours = made(((5, 0, 20),), error=0.005)
    for head, wrong in (("bfloat16", False), ("default", True)):
        expected = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="float32", head_precision=head)
        probe = Probe(ParityConfig(), expected=expected, score=lambda samples: [], dtype="float32")
        assert bool(probe.compare_again([sample], [ours], version=5)) == wrong


@pytest.mark.parametrize(("dtype", "experts", "error", "wrong"), [
    ("bfloat16", False, 0.015, False), ("bfloat16", False, 0.021, True), ("bfloat16", True, 0.021, False),
    ("bfloat16", True, 0.05, False), ("bfloat16", True, 0.07, True), ("float32", True, 0.002, True),
])  # fmt: skip
def test_experts_in_bfloat16_have_room(dtype, experts, error, wrong):
    """.020 on average and .20 at p99 were measured of honest sides: limits of just that turn some away."""
    sample, ours = made(((5, 0, 20),), error=error)
    expected = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="bfloat16", experts=experts)
    probe = Probe(ParityConfig(), expected=expected, score=lambda samples: [], dtype=dtype)
    assert bool(probe.compare_again([sample], [ours], version=5)) == wrong
    for own in (ParityConfig(mean_limit=0.001), ParityConfig(p99_limit=0.001)):
        assert Probe(own, expected=expected, score=lambda samples: [], dtype=dtype).limits.count(0.001) >= 1


def test_mismatch_is_over_sampled_tokens_only(start):
    with Trainer(config(), start({})) as trainer:
        candidate = eventually(trainer.fleet.trust.due)[0]
    samples = [(p.token_ids, c) for p, c in candidate.samples]
    sampled = sum(int(c.sampled().sum()) for _, c in samples)
    ours = [np.where(c.sampled(), c.logprobs - 0.25, 7.0) for _, c in samples]
    found = mismatch(samples, ours)
    assert found.tokens == sampled
    assert found.mean == pytest.approx(0.25, abs=1e-6)
    assert found.p99 == pytest.approx(0.25, abs=1e-6)
    assert mismatch(samples, [c.logprobs for _, c in samples]).p99 == 0
    ours[0][0] = np.nan
    assert not mismatch(samples, ours).mean <= LIMITS["bfloat16"][0]


def test_one_token_with_other_bits_is_too_many_where_the_run_is_bitwise():
    sample, ours = made(((5, 0, 20),), error=0.0)
    expected = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="float32", numerics="bitwise")
    probe = Probe(ParityConfig(), expected=expected, score=lambda samples: [], dtype="float32")
    assert probe.compare_again([sample], [ours], version=5) == ""
    ours[-1] = np.nextafter(ours[-1], np.float32(0))
    assert "of 1 of 20 tokens are not the trainer's to the bit" in probe.compare_again([sample], [ours], version=5)


def test_a_bitwise_run_refuses_other_machines_and_programs():
    expected = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="float32", numerics="bitwise")
    known = {"tokenizer_fingerprint": "a", "model_config": "{}", "sync_dtype": "float32", "head_dtype": "float32"}
    compare("s:1", pb.StatusReply(**known, numerics=row_blocks.fingerprint()), expected)
    for numerics in ("", "fast"):
        with pytest.raises(ProbeError, match=r"s:1: config\.numerics=bitwise: start it with --numerics=bitwise"):
            compare("s:1", pb.StatusReply(**known, numerics=numerics), expected)
    processor = row_blocks.fingerprint().split(", XLA_FLAGS")[0].rsplit(" ", 1)[1]  # a digest of its instructions
    others = {
        f"jax {jax.__version__}": "jax 0.1.2", "rows 64": "rows 8", "XLA_FLAGS": "XLA_FLAGS --an_option",
        processor: "0123abcd",
    }  # fmt: skip
    for ours, theirs in others.items():
        other = row_blocks.fingerprint().replace(ours, theirs)
        with pytest.raises(
            ProbeError, match=f"of another machine or program .*{theirs}.*the trainer's are of .*{ours}"
        ):
            compare("s:1", pb.StatusReply(**known, numerics=other), expected)
    compare("s:1", pb.StatusReply(**known, numerics="fast"), dataclasses.replace(expected, numerics="fast"))


def test_another_head_precision_stops_the_run_and_names_the_flag():
    expected = Expected(
        tokenizer_fingerprint="a", model_config="{}", sync_dtype="bfloat16", head_precision="highest", maximum_tokens=9
    )
    known = {"tokenizer_fingerprint": "a", "model_config": "{}", "sync_dtype": "bfloat16", "head_dtype": "float32"}
    status = pb.StatusReply(**known, maximum_tokens=9)
    compare("s:1", status, expected)  # a server that does not tell: what it samples is compared
    status.head_precision = "highest"
    compare("s:1", status, expected)
    status.head_precision = "default"
    with pytest.raises(ProbeError, match=r"its head precision is default.*start it with --head_precision=highest"):
        compare("s:1", status, expected)
    rounding = dataclasses.replace(expected, head_precision="bfloat16")
    with pytest.raises(ProbeError, match=r"its head precision is default.*start it with --head_precision=bfloat16"):
        compare("s:1", status, rounding)
    status.head_precision = ""  # it does not tell, but for the dtype
    with pytest.raises(ProbeError, match=r"its head dtype is float32, the trainer's is bfloat16"):
        compare("s:1", status, rounding)
    status.head_precision = "highest"
    with pytest.raises(ProbeError, match=r"config\.rollout\.router_replay needs .*start it with --router_replay"):
        compare("s:1", status, dataclasses.replace(expected, router_replay=True))
    status.sync_dtype = "float32"
    with pytest.raises(ProbeError, match=r"its wire dtype is float32.*start it with --sync_dtype=bfloat16"):
        compare("s:1", status, expected)
