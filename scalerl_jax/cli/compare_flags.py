"""The flags that scalerl-compare has beside those of scalerl-fit. Apart from what reads them, see command_flags.py."""

from absl import flags

SEED_MARGIN = 0.02  # scaling/fit.py says why

BASELINE = flags.DEFINE_string("baseline", None, "Run that the others are compared with; without it the first.")
MARGIN = flags.DEFINE_float("margin", SEED_MARGIN, "A's (or scores) closer than this do not differ.", lower_bound=0.0)
COMMON = flags.DEFINE_float(
    "common_asymptote", None, "A to refit with where A's do not differ; without it their mean.", lower_bound=0.0,
    upper_bound=1.0,
)  # fmt: skip
FORECAST = flags.DEFINE_bool("forecast", False, "What more compute will buy each run; --target, --budget.")
BUDGET = flags.DEFINE_float(
    "budget", None, "Compute of a whole run, in x's unit, at which scores are forecast and compared; of run folders "
    "what that is in device-hours is printed.",
)  # fmt: skip
PLAN_BUDGET = flags.DEFINE_float(
    "plan_budget", None, "Extra compute, in x's unit: which run to extend with it is asked."
)
