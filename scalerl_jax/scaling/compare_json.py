"""A comparison, forecasts and a plan as scalerl-compare writes them in JSON; infinite and open numbers become null."""

import dataclasses
from typing import Any

from scalerl_jax.scaling.compare import Comparison, Difference
from scalerl_jax.scaling.decide import Extension, Plan
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.forecast import Forecast

# Verdicts in words: a row's A against the baseline's, or a pair's first against its second.
VERDICTS = {"": "baseline", "first": "higher", "second": "lower", "none": "no difference shown", "open": "undecided"}


def run_document(run: Run) -> dict[str, Any]:
    fit = run.fit
    return {
        "run": run.name,
        **fit.parameters,
        "intervals_95": fit.intervals,
        "points": fit.points,
        "seeds": run.seeds,
        "reached": run.reached,
        "ssr": fit.ssr,
        "identified": fit.identified,
        "verdict": fit.verdict,
    }


def _difference_document(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"value": found.value, "95": found.interval_95, "90": found.interval_90}


def comparison_document(found: Comparison) -> dict[str, Any]:
    table = [
        {
            "run": row.run.name,
            "asymptote": row.run.fit.asymptote,
            "asymptote_95": row.interval_95,
            "asymptote_difference": _difference_document(row.asymptote),
            "verdict": VERDICTS[row.verdict],
            "with_common_asymptote": None
            if row.slope is None
            else {
                **row.slope.parameters,
                "ssr": row.slope.ssr,
                "exponent_95": row.slope.exponent_95,
                "exponent_difference": _difference_document(row.exponent),
            },
        }
        for row in found.table
    ]
    pairs = [
        {
            "first": pair.first.name,
            "second": pair.second.name,
            "asymptote_difference": _difference_document(pair.asymptote),
            "verdict": VERDICTS[pair.verdict],
            "common_asymptote": None if pair.slopes is None else pair.slopes[0].asymptote,
            "exponents": None if pair.slopes is None else [slope.exponent for slope in pair.slopes],
            "exponent_difference": _difference_document(pair.exponent),
            "sentence": pair.sentence,
        }
        for pair in found.pairs
    ]
    return {
        "baseline": found.baseline.name,
        "margin": found.margin,
        "common_asymptote": found.common_asymptote,
        "table": table,
        "pairs": pairs,
    }


def forecast_document(run: Run, found: Forecast) -> dict[str, Any]:
    return {"run": run.name, **dataclasses.asdict(found)}


def plan_document(plan: Plan) -> dict[str, Any]:
    def extension(one: Extension | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {"extra": one.extra, "compute": one.cost, "wrong": one.wrong, "shortfall": one.regret}

    return {
        "by": "asymptote" if plan.at is None else "score",
        "at": plan.at,
        "best_now": plan.best,
        "wrong_now": plan.wrong,
        "shortfall_now": plan.regret,
        "chance_to_be_best": plan.chances,
        "extensions": [extension(one) for one in plan.extensions],
        "recommended": extension(plan.recommended),
        "reason": plan.reason,
    }
