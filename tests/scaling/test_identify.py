"""When points tell A, and whether the compute said to tell it does."""

import numpy as np
import pytest

from scalerl_jax.scaling import fit_sigmoid, identify
from tests.scaling import many
from tests.scaling.simulated import TABLE_1


@pytest.mark.parametrize(
    ("changed", "identified"),
    [
        ({}, True),
        ({"high": 0.6391}, False),  # 0.04 wide
        ({"high": 0.6389}, True),
        ({"low": 0.98, "high": 1.0}, False),  # cut off at 1, and so narrow for that alone
        ({"low": 0.98, "high": 1.0, "reached": 0.961}, True),  # it is there: A is not below, and nothing is above 1
        ({"low": 0.98, "high": 1.01, "reached": 0.961}, True),
        ({"low": 0.95, "high": 1.0, "reached": 0.961}, False),
        ({"initial": 0.5999}, False),  # nor at R0
        ({"most": 4499.0}, False),  # the data end before 1.5 times the upper end of C_mid
        ({"highest_midpoint": np.inf}, False),
    ],
)
def test_each_condition_counts(changed, identified):
    told = {"low": 0.5991, "high": 0.62, "highest_midpoint": 3000.0, "initial": 0.4, "most": 4500.0}
    told |= {"reached": 0.58, **changed}
    assert identify.is_identified(**told) == identified
    together = identify.is_identified(**{name: np.array([value] * 2) for name, value in told.items()})
    np.testing.assert_array_equal(together, [identified] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "end"), [("ScaleRL", 4600), ("bs2048", 16_000)])
def test_the_compute_said_to_tell_does(name, end):
    """Half of the runs that go on as far are identified there, and hardly any well before."""
    compute = many.schedule(name, 8 * end)
    runs = many.simulate(np.random.default_rng(1), TABLE_1[name], compute, 14)
    there, before = [], []
    for i, passes in enumerate(runs.passes):
        at = np.append(0, compute)
        reward = np.append(runs.initial[i], runs.reward[i])

        def fit(until, at=at, reward=reward, passes=passes):
            return fit_sigmoid(at[at <= until], reward[at <= until], counts=(passes[at <= until], many.SAMPLES))

        early = fit(end)
        if early.identified:
            assert early.compute_to_identify == at[at <= end].max()
            continue
        needed = early.compute_to_identify
        assert needed > at[at <= end].max()
        if needed <= compute.max():
            there.append(fit(needed).identified)
            before.append(fit(end + 0.4 * (needed - end)).identified)
    assert len(there) >= 8
    assert np.mean(there) >= 0.5
    assert np.mean(before) <= 0.3


def test_nothing_is_named_where_nothing_would_tell():
    """A curve whose end is 1, where no interval closes, and which is not near it at 100 times the compute."""
    compute = np.linspace(0, 8000, 8)
    fit = fit_sigmoid(compute, 0.2 + 0.9 / (1 + (8000 / np.maximum(compute, 1e-9)) ** 0.5))
    assert not fit.identified and not fit.misfit and fit.asymptote == 1
    assert fit.compute_to_identify == np.inf
    assert "would not identify it either" in fit.verdict


def test_a_run_that_has_come_to_1_tells_it():
    compute = np.arange(30.0)
    rise = 0.8 / (1 + (3 / np.maximum(compute, 1e-9)) ** 4)
    score = np.minimum(1.0, np.round(0.2 + rise, 3))
    fit = fit_sigmoid(compute, score)
    assert fit.identified and fit.compute_to_identify == 29
    assert fit.verdict.startswith("A is identified: 1.000 to 1.000 (95 %)")
    early = fit_sigmoid(compute[:6], score[:6] + 0.004 * np.array([0, 1, -1, 1, -1, 1]))
    assert not early.identified and early.compute_to_identify < 100  # it is going there
    # Counted, with all the noise of it: of the last evaluations nearly all pass.
    counted = np.random.default_rng(0).binomial(1024, 0.2 + rise, (6, 30))
    told = [fit_sigmoid(compute, passes / 1024, counts=(passes, np.full(30, 1024))).identified for passes in counted]
    assert sum(told) >= 4


def test_sentences():
    near = identify.sentence(False, (0.96, 1.0), most=9, needed=9.0432)
    assert "evaluations up to about 9.04 would identify it" in near and near.endswith("(these end at 9)")
    told = identify.sentence(True, (0.6012, 0.6189), most=8000, needed=8000)
    assert told == "A is identified: 0.601 to 0.619 (95 %), and 0.02 either way between seeds"
    not_told = identify.sentence(False, (0.6213, 0.8), most=8000, needed=31_840)
    assert not_told == (
        "A is not identified yet: 0.62 to 0.80 fit as well; evaluations up to about 32000 would identify it, if the "
        "curve is as fitted (these end at 8000)"
    )
    flops = identify.sentence(False, (0.6213, 0.8), most=1.8123e13, needed=2.38e13)
    assert "up to about 24T would identify it" in flops and flops.endswith("(these end at 18.12T)")
