"""The law against its published values and its own identities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.scaling import law
from scalerl_jax.scaling.law import double_precision
from tests.scaling.simulated import curve

# Published triples at R0 = 0.40, to the four digits they are printed with.
PRINTED = {
    (2542, 1.92, 0.610): (0.4560, 0.5033, 0.5480, 0.5891, 0.6040, 0.6093, 0.6098),
    (10909, 1.70, 0.645): (0.4081, 0.4185, 0.4377, 0.4909, 0.5610, 0.6279, 0.6395),
    (11272, 1.89, 0.645): (0.4053, 0.4134, 0.4303, 0.4841, 0.5616, 0.6312, 0.6411),
    (3093, 1.77, 0.610): (0.4457, 0.4855, 0.5285, 0.5771, 0.5991, 0.6085, 0.6096),
}
COMPUTE = np.array([1500.0, 2500, 4000, 8000, 16000, 50000, 100000])

parameters = st.fixed_dictionaries(
    {
        "asymptote": st.floats(0.5, 1.0),
        "exponent": st.floats(0.3, 6.0),
        "midpoint": st.floats(1e-3, 1e20),
        "initial_reward": st.floats(0.0, 0.45),
    }
)


@pytest.mark.parametrize("triple", PRINTED)
def test_published_curves(triple):
    midpoint, exponent, asymptote = triple
    with double_precision():
        scores = law.sigmoid_law(
            COMPUTE, asymptote=asymptote, exponent=exponent, midpoint=midpoint, initial_reward=0.40
        )
    np.testing.assert_allclose(scores, PRINTED[triple], atol=5.1e-5)


@given(parameters, st.floats(-3, 3))
@settings(max_examples=40, deadline=None)
def test_written_as_in_the_paper(p, decades):
    compute = p["midpoint"] * 10**decades
    with double_precision():
        score = float(law.sigmoid_law(compute, **p))
    expected = curve(compute, p["midpoint"], p["exponent"], p["asymptote"], p["initial_reward"])
    assert score == pytest.approx(float(expected), rel=1e-12)


def test_anchors():
    p = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542.0, "initial_reward": 0.4}
    with double_precision():
        ends = np.asarray(law.sigmoid_law(np.array([0.0, 2542.0, 1e30]), **p))
    np.testing.assert_allclose(ends, [0.4, 0.505, 0.61], rtol=1e-12)


@given(parameters, st.floats(0.02, 0.98))
@settings(max_examples=40, deadline=None)
def test_compute_to_reach_is_the_inverse(p, share):
    target = p["initial_reward"] + share * (p["asymptote"] - p["initial_reward"])
    with double_precision():
        reached = law.sigmoid_law(law.compute_to_reach(target, **p), **p)
        assert float(reached) == pytest.approx(target, rel=1e-9)
        assert float(law.compute_to_reach(p["asymptote"], **p)) == np.inf
        assert float(law.compute_to_reach(p["initial_reward"], **p)) == 0.0


def test_a_curve_without_gain_reaches_nothing_above_r0():
    p = {"asymptote": 0.25, "exponent": 1.92, "midpoint": 2542.0, "initial_reward": 0.25}
    assert float(law.compute_to_reach(0.3, **p)) == np.inf
    assert float(law.compute_to_reach(0.25, **p)) == 0.0


def test_straightened_form_has_slope_b():
    p = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542.0, "initial_reward": 0.4}
    with double_precision():
        score = law.sigmoid_law(COMPUTE, **p)
        straight = np.asarray(law.straighten(score, **p))
    np.testing.assert_allclose(straight, COMPUTE**1.92, rtol=1e-8)
    slope = np.polyfit(np.log(COMPUTE), np.log(straight), 1)[0]
    assert slope == pytest.approx(1.92, abs=1e-9)
    with double_precision():
        assert np.isnan(law.straighten(np.array([0.39, 0.40, 0.61, 0.7]), **p)).all()


def test_becomes_the_power_law():
    p = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542.0, "initial_reward": 0.4}
    compute = np.array([1e6, 1e7])
    with double_precision():
        coefficient = (0.61 - 0.4) * 2542.0**1.92
        power = law.power_law(compute, asymptote=0.61, coefficient=coefficient, exponent=1.92)
        np.testing.assert_allclose(0.61 - power, 0.61 - law.sigmoid_law(compute, **p), rtol=1e-4)
