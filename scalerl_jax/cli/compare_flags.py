"""The flags of scalerl-compare besides those of scalerl-fit. No heavy imports, see command_flags.py."""

from absl import flags

SEED_MARGIN = 0.02  # for the reason see scaling/fit.py

BASELINE = flags.DEFINE_string("baseline", None, "Run that the others are compared with. Default: the first.")
MARGIN = flags.DEFINE_float(
    "margin", SEED_MARGIN, "Differences of A (or of scores) below this do not count.", lower_bound=0.0
)
COMMON = flags.DEFINE_float(
    "common_asymptote", None, "A that all runs are refitted with where their A's do not differ. Default: the mean.",
    lower_bound=0.0, upper_bound=1.0,
)  # fmt: skip
FORECAST = flags.DEFINE_bool("forecast", False, "Forecast what more compute buys each run, by --target or --budget.")
BUDGET = flags.DEFINE_float(
    "budget", None, "Compute of a whole run, in x's unit, at which scores are forecast and compared. For run folders "
    "it is printed in device-hours too.",
)  # fmt: skip
PLAN_BUDGET = flags.DEFINE_float("plan_budget", None, "Extra compute, in x's unit: print which run to extend with it.")
