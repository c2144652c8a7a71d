"""Numbers fitted on complete runs, and how they are judged on runs they have not seen."""

import dataclasses

import numpy as np
import pytest
import scipy.optimize
from scipy.special import expit, logit

from scalerl_jax.scaling import average, calibrate, judged
from scalerl_jax.scaling.average import SCALES, Calibration
from scalerl_jax.scaling.fit import SigmoidFit
from scalerl_jax.scaling.law import LAWS
from tests.scaling.simulated import TABLE_1, curve

TRIALS = 4000
COMPUTE = np.linspace(0, 16_000, 25)


def run_of(name, recipe, scores, seed, task=""):
    passes = np.random.default_rng(seed).binomial(TRIALS, scores)
    return calibrate.whole_run(name, recipe, COMPUTE, passes, np.full(len(passes), TRIALS), task=task)


def law_runs(count=6, bend=0.0):
    """Runs on the law that leave it after the half of their compute, by a logit of `bend` an octave up or down."""
    runs = []
    for i in range(count):
        scores = curve(COMPUTE, *TABLE_1[list(TABLE_1)[i % 6]])
        octaves = np.log2(np.maximum(COMPUTE / 8000, 1))
        scores = expit(logit(scores) + bend * octaves * (-1) ** i)
        runs.append(run_of(f"run {i}", f"recipe {i // 2}", scores, seed=i))
    return runs


def with_tasks(cases, task_of):
    runs = {case.run: dataclasses.replace(case.run, task=task_of(case.run.name)) for case in cases}
    return [dataclasses.replace(case, run=runs[case.run]) for case in cases]


@pytest.fixture(scope="module")
def on_the_law():
    return calibrate.cases(law_runs())


def test_the_noise_of_an_evaluation_is_given_before_the_dispersion(on_the_law, monkeypatch):
    """The band multiplies it: it was multiplied twice."""
    passed = set()

    def band(self, compute, *, level, evaluation_variance):
        passed.add(evaluation_variance)
        return self.predict(compute), self.predict(compute)

    monkeypatch.setattr(SigmoidFit, "band", band)
    judged.sigmoid(on_the_law[1])
    assert passed == {float(np.median(on_the_law[1].before.variance))}


@pytest.mark.slow
def test_cases_are_all_fractions_of_all_runs(on_the_law):
    assert [(case.run.name, case.fraction) for case in on_the_law[:3]] == [("run 0", f) for f in calibrate.FRACTIONS]
    for case in on_the_law:
        assert case.before.most <= case.fraction * 16_000 < case.later.compute.min()
        assert len(case.before.compute) + len(case.later.compute) == 24


@pytest.mark.slow
def test_runs_that_leave_the_law_widen_it(on_the_law):
    sure = calibrate.calibrate(calibrate.Densities(on_the_law))
    unsure = calibrate.calibrate(calibrate.Densities(calibrate.cases(law_runs(bend=1.0))))
    assert sure.runs == unsure.runs == 6
    for found in (sure, unsure):
        assert sum(map(sum, found.prior.values())) == pytest.approx(1)
    small, large = (np.sum([found.prior[name][:2] for name in LAWS]) for found in (sure, unsure))
    assert small > 2 * large
    # Two of five laws hold the sigmoid; weights that told nothing would give them two fifths.
    assert sum(sure.prior["sigmoid"]) + sum(sure.prior["richards"]) > 0.45
    widths = {}
    for told, found in (("sure", sure), ("unsure", unsure)):
        widths[told] = np.mean([calibrate.judge(case, found)["average"].width for case in on_the_law[1::3]])
    assert widths["sure"] < 0.12 and widths["unsure"] > 1.5 * widths["sure"]


def _cost(densities, chosen):
    """What is minimized, and from where."""
    seen = {}

    def minimize(cost, start, **_):
        seen.update(cost=cost, start=start)
        return scipy.optimize.OptimizeResult(x=start, fun=0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate.scipy.optimize, "minimize", minimize)
        calibrate._fit(densities, 1.0, chosen)
    return seen["cost"], seen["start"]


def test_the_numbers_are_the_best_there_are(on_the_law):
    """Its gradient is that of its value, and nothing near the minimum is lower."""
    densities = calibrate.Densities(on_the_law[:6])
    everything = range(6)
    cost, start = _cost(densities, everything)
    rng = np.random.default_rng(0)
    at = start + 0.5 * rng.standard_normal(len(start))
    _, gradient = cost(at)
    for i in range(0, len(at), 3):
        step = np.zeros(len(at))
        step[i] = 1e-5
        assert gradient[i] == pytest.approx((cost(at + step)[0] - cost(at - step)[0]) / 2e-5, rel=1e-4, abs=1e-7)
    best = calibrate._fit(densities, 1.0, everything)
    assert all(best.fun <= cost(best.x + 0.3 * rng.standard_normal(len(at)))[0] for _ in range(20))


def test_a_record_is_what_the_forecast_computes_for_itself(on_the_law):
    case = on_the_law[1]
    even = Calibration(dict.fromkeys(LAWS, (0.05,) * len(SCALES)), growth=0.75, rate=2.0)
    by_itself = average.record(case.before, even)
    for name, one in case.record.items():
        np.testing.assert_allclose(one.log_density(0.75).mean(axis=1), by_itself[name], rtol=1e-9)


@pytest.mark.slow
def test_a_run_has_no_say_in_its_own_judgement(on_the_law):
    """What the runs of a recipe did later changes how they are judged, and by nothing they are foretold."""
    scores = calibrate.leave_one_out(on_the_law)
    runs = law_runs()
    changed = [
        run_of(run.name, run.recipe, 1 - 0.5 * curve(COMPUTE, *TABLE_1["Scout"]), 9)
        if run.recipe == "recipe 1"
        else run
        for run in runs
    ]
    judged_run = on_the_law[7].run
    others = [c for c in on_the_law if c.run.recipe != "recipe 1" and not calibrate.agree(judged_run, c.run)]
    again = calibrate.leave_one_out(calibrate.cases(changed))
    by_hand = calibrate.judge(on_the_law[7], calibrate.calibrate(calibrate.Densities(others)))
    assert judged_run.recipe == "recipe 1" and {case.run.name for case in others} == {"run 0", "run 1", "run 5"}
    assert scores[7] == by_hand
    assert again[0] != scores[0]  # the other recipes are foretold with the changed runs' help


def test_each_task_counts_as_much_as_any_other(on_the_law):
    given = with_tasks(on_the_law, lambda name: "few" if name == "run 0" else "many")
    densities = calibrate.Densities(given)
    whole, few, many = (_cost(densities, chosen) for chosen in (range(len(given)), range(3), range(3, len(given))))
    at = whole[1] + 0.5 * np.random.default_rng(0).standard_normal(len(whole[1]))
    mean, rate = calibrate._RATE_PRIOR
    off = np.append(at[:-1] / calibrate._WEIGHT_DEVIATION, (at[-1] - mean) / rate)
    prior = calibrate._HEARD / 2 * off @ off  # with one task; with two it is heard half as much beside the mean
    assert whole[0](at)[0] == pytest.approx((few[0](at)[0] + many[0](at)[0] - prior) / 2, rel=1e-12)


@pytest.mark.slow
def test_a_run_is_judged_by_other_tasks_and_by_no_run_that_agrees_with_it(on_the_law):
    """Recipes are of the judged run's task here, and a run of another task repeats run 0 with noise of its own."""
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    twin = calibrate.cases([run_of("twin", "another", scores, seed=77, task="b")])
    runs = {case.run.name: case.run for case in on_the_law}
    given = with_tasks(on_the_law, lambda name: "b" if name == "run 5" else "a") + twin
    assert calibrate.agree(runs["run 0"], twin[0].run) and not calibrate.agree(runs["run 1"], twin[0].run)
    found = calibrate.leave_one_out(given)
    alone = [case for case in given if case.run.name == "run 5"]
    assert found[0] == calibrate.judge(given[0], calibrate.calibrate(calibrate.Densities(alone)))
    both = calibrate.calibrate(calibrate.Densities([*alone, *twin]))
    assert found[3] == calibrate.judge(given[3], both)


def test_runs_of_one_name_are_judged_apart(monkeypatch):
    """Two tasks have runs of the same names: each is judged by those of the other task, and by all of these."""
    monkeypatch.setattr(calibrate.average, "hindsight", lambda *_: {})
    monkeypatch.setattr(calibrate.average, "hindsight_of_end", lambda _: None)
    monkeypatch.setattr(calibrate, "Densities", lambda given: given)
    monkeypatch.setattr(
        calibrate, "calibrate", lambda given, chosen: {(given[i].run.name, given[i].run.task) for i in chosen}
    )
    monkeypatch.setattr(calibrate, "judge", lambda case, others: (case.run, others))
    runs = [
        run_of(recipe, recipe, (0.5 if task == "b" else 1) * curve(COMPUTE, *TABLE_1[recipe]), seed=i, task=task)
        for i, (task, recipe) in enumerate((task, recipe) for task in "ab" for recipe in ("ScaleRL", "8gen"))
    ]
    found = calibrate.leave_one_out(calibrate.cases(runs))
    assert [run for run, _ in found] == [run for run in runs for _ in calibrate.FRACTIONS]
    for run, others in found:
        other = "b" if run.task == "a" else "a"
        assert others == {("ScaleRL", other), ("8gen", other)}


def test_runs_of_one_truth_agree_and_those_of_two_do_not():
    """Twenty pairs of 24 evaluations each: chance alone makes a pair disagree in 1 of 300, or three of them in 1e6."""
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    pairs = [[run_of("x", "x", scores, seed) for seed in (2 * n, 2 * n + 1)] for n in range(20)]
    assert sum(calibrate.agree(*pair) for pair in pairs) >= 18
    off = [run_of("y", "y", np.clip(scores + 0.03, 0, 1), 100 + n) for n in range(20)]
    assert not any(calibrate.agree(pair[0], other) for pair, other in zip(pairs, off))
    # Of another pace: its evaluations are at other places of the same curve.
    every = np.delete(np.arange(len(COMPUTE)), np.arange(2, 24, 3))
    passes = np.random.default_rng(5).binomial(TRIALS, scores)[every]
    sparse = calibrate.whole_run("z", "z", COMPUTE[every], passes, np.full(len(every), TRIALS))
    assert calibrate.agree(pairs[0][0], sparse) and calibrate.agree(sparse, pairs[0][0])


def test_one_recipe_cannot_be_judged(on_the_law):
    alone = [case for case in on_the_law if case.run.recipe == "recipe 0"]
    with pytest.raises(ValueError, match="all runs are of one recipe, 'recipe 0'"):
        calibrate.leave_one_out(alone)
    with pytest.raises(ValueError, match="no run that rises has points enough"):
        calibrate.calibrate(calibrate.Densities([]))


@pytest.mark.slow
def test_of_a_run_that_has_fallen_the_random_walk_alone_speaks(on_the_law):
    scores = np.where(COMPUTE < 5000, curve(COMPUTE, *TABLE_1["ScaleRL"]), 0.15)
    fallen = calibrate.cases([*law_runs(), run_of("fallen", "recipe 3", scores, 0)])[-2]
    assert fallen.run.name == "fallen" and fallen.fraction == 0.5
    even = Calibration(dict.fromkeys(LAWS, (0.05,) * len(SCALES)), growth=1.0, rate=2.0)
    found = average.average_forecast(fallen.before, even).law_weights
    assert found["random_walk"] == pytest.approx(1)
    assert abs(calibrate.judge(fallen, even)["average"].error) < 0.05
    # What the other laws say of it has no part in how they are weighed.
    with_it, without = (
        calibrate.calibrate(calibrate.Densities(cases)) for cases in ([*on_the_law, fallen], on_the_law)
    )
    assert with_it.prior == without.prior and with_it.runs == without.runs + 1


def test_crps_is_its_integral():
    rng = np.random.default_rng(0)
    made, measured = rng.uniform(0.2, 0.7, (500, 3)), np.array([0.1, 0.45, 0.9])
    grid = np.linspace(0, 1, 20_001)
    for column, value, found in zip(made.T, measured, calibrate._crps(made, measured)):
        below = np.searchsorted(np.sort(column), grid, side="right") / len(column)
        assert found == pytest.approx(np.trapezoid((below - (grid >= value)) ** 2, grid), abs=1e-4)


@pytest.mark.slow
def test_judged_in_a_table(on_the_law):
    even = Calibration(dict.fromkeys(LAWS, (0.05,) * len(SCALES)), growth=1.0, rate=2.0)
    three = on_the_law[: 3 * len(calibrate.FRACTIONS)]
    assert len({case.run.name for case in three}) == 3
    scores = [calibrate.judge(case, even) for case in three]
    sigmoids = [judged.sigmoid(case) for case in three]
    table = judged.summaries(three, scores, sigmoids)
    forecasts = ["average", *LAWS, "sigmoid, profile", "paper's procedure"]
    assert [row.forecast for row in table] == forecasts * len(calibrate.FRACTIONS)
    assert [row.fraction for row in table[:: len(forecasts)]] == list(calibrate.FRACTIONS)
    of = {(row.fraction, row.forecast): row for row in table}
    assert of[0.7, "sigmoid"].mean_error < 0.02 and of[0.7, "paper's procedure"].mean_error < 0.03
    assert of[0.7, "sigmoid, profile"].covered[2] > 0.75
    assert of[0.3, "average"].crps > of[0.7, "average"].crps
    row = of[0.5, "power"]
    cases = [i for i, case in enumerate(three) if case.fraction == 0.5]
    assert row.mean_error == pytest.approx(np.mean([abs(scores[i]["power"].error) for i in cases]))
    assert row.bias == pytest.approx(np.mean([scores[i]["power"].error for i in cases]))
    said = judged.identified_sentence(three, sigmoids, 0.7)
    named = sum(one.identified for case, one in zip(three, sigmoids) if case.fraction == 0.7)
    assert said.startswith(f"from 70%: A is called identified in {named} of 3; ")
    assert judged.SigmoidForecast((), 0.0, 0.0, 0.0, True, 0.6, (0.59, 0.61), 0.62).missed
    assert not judged.SigmoidForecast((), 0.0, 0.0, 0.0, False, 0.6, (0.59, 0.61), 0.62).missed
