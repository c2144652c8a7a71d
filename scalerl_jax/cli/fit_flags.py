"""The flags of scalerl-fit, which scalerl-compare has too. No heavy imports, see cli/command_flags.py."""

from absl import flags

SCALES = ("auto", "accuracy", "reward", "percent")

X = flags.DEFINE_string(
    "x", None, "Column of the compute: GPU-hours, FLOPs, tokens, steps. typical_hours, the default of run folders, is "
    "the step times the run's median device_hours a step.",
)  # fmt: skip
Y = flags.DEFINE_string("y", None, "Column of the score.")
X_UNIT = flags.DEFINE_string("x_unit", "", "Unit of x to show, or FROM:TO to convert, for example s:h or FLOP:EFLOP.")
Y_SCALE = flags.DEFINE_enum("y_scale", "auto", SCALES, "What y is; auto: rewards if some are below 0.")
R0 = flags.DEFINE_string("r0", None, "Accuracy at compute 0, a number or 'fit'. Default: the row at compute 0.")
BURN_IN = flags.DEFINE_float("burn_in", 0.0, "Drop points of less compute than this, in the unit shown.")
FIT_UNTIL = flags.DEFINE_string("fit_until", None, "Hold out points of more compute than this: a number, or 'half'.")
GRID = flags.DEFINE_enum("grid", "auto", ("auto", "paper"), "paper: exactly the paper's procedure.")
BOOTSTRAP = flags.DEFINE_integer("bootstrap", 0, "Refits of resampled data; 0: none.", lower_bound=0)
PROMPTS = flags.DEFINE_enum(
    "bootstrap_prompts", "fixed", ("fixed", "population"), "population: every resample draws prompts too, one set for "
    "all its evaluations.",
)  # fmt: skip
SEED = flags.DEFINE_integer("seed", 0, "Seed of the bootstrap.", lower_bound=0)
TARGET = flags.DEFINE_float(
    "target", None, "Accuracy to reach; its compute is printed.", lower_bound=0.0, upper_bound=1.0
)
RUN_COLUMN = flags.DEFINE_string("run_column", None, "Column that names the run, if a file has several.")
SEED_COLUMN = flags.DEFINE_string("seed_column", None, "Column that names the seed, if a file has several of a run.")
SEEDS = flags.DEFINE_enum("seeds", "none", ("none", "folder"), "folder: the files of one folder are seeds of one run.")
TASK_COLUMN = flags.DEFINE_string(
    "task_column", None, "scalerl-calibrate: column of a run's task; a run is then judged by the other tasks' runs."
)
PASSES = flags.DEFINE_string("passes", None, "Column of the passes of each evaluation.")
TRIALS = flags.DEFINE_string("trials", None, "Column of the trials of each evaluation.")
DUPLICATES = flags.DEFINE_enum(
    "duplicates", "error", ("error", "last", "mean"), "Rows of a run with the same x: an error that shows them, the "
    "last of them, or their mean.",
)  # fmt: skip
CALIBRATION = flags.DEFINE_string(
    "calibration", None, "File written by scalerl-calibrate from runs like these. Default: that of 35 runs in "
    "configs/bank.csv. scalerl-calibrate itself then fits nothing, and prints how often this file's forecasts hold.",
)  # fmt: skip
OUT = flags.DEFINE_string("out", None, "Folder to write NAME.json, NAME.png and NAME.svg to.")
