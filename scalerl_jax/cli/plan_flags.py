"""The flags of scalerl-plan. Apart from what reads them, see cli/command_flags.py."""

from absl import flags

# Of their own until `define`: --out, --target and others are flags of other commands, too, and one process may import
# several of these.
VALUES = flags.FlagValues()

TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Chips to plan for: v5e:8x8, v5p:4x4x4 or v6e:8x8 as a TPU slice is named; h100:8, h200:2x8 or "
    "b200:8 for nodes x GPUs of each.", flag_values=VALUES
)  # fmt: skip
SLICES = flags.DEFINE_integer(
    "slices", 1, "TPU slices, joined by the data center's network.", lower_bound=1, flag_values=VALUES
)
MODEL_CONFIG = flags.DEFINE_string(
    "model_config", "", "config.json of the policy, or its folder. Default: that of config.model.path, or of "
    "config.sft.model_file, or NAME.json beside the config file NAME.py.", flag_values=VALUES
)  # fmt: skip
COMPILES = flags.DEFINE_integer(
    "compiles",
    4,
    "TPUs: other layouts to compile, at most, in search of one that fits; 0: no search.",
    lower_bound=0,
    flag_values=VALUES,
)
PEAK_SHARE = flags.DEFINE_float(
    "peak_share", 1.0, "Of the chip's rate that matrix products reach; 1: the roofline itself.", lower_bound=0.01,
    upper_bound=1.0, flag_values=VALUES
)  # fmt: skip
PROMPT_TOKENS = flags.DEFINE_float(
    "prompt_tokens", 256.0, "Mean tokens of a prompt.", lower_bound=1.0, flag_values=VALUES
)
COMPLETION_TOKENS = flags.DEFINE_float(
    "completion_tokens",
    0.0,
    "Mean tokens of a completion; 0: half of thinking and answer budget.",
    lower_bound=0.0,
    flag_values=VALUES,
)
ROW_USE = flags.DEFINE_float(
    "row_use", 0.95, "Share of a packed row that segments take (row_use in metrics.jsonl).", lower_bound=0.01,
    upper_bound=1.0, flag_values=VALUES
)  # fmt: skip
TOKENS_PER_SECOND = flags.DEFINE_float(
    "generator_tokens_per_second", 0.0, "That one generator samples; 0: nothing is said of generators.",
    lower_bound=0.0, flag_values=VALUES
)  # fmt: skip
GENERATOR = flags.DEFINE_string(
    "generator", "", "Machine of generators with the JAX engine, one on each device, as in h100:1 or v5p:2x2x1: their "
    "programs are compiled for it, with the slots and lengths of the config.", flag_values=VALUES
)  # fmt: skip
GENERATORS = flags.DEFINE_integer(
    "generators", 0, "How many there are; 0: as many as keep the trainer fed.", lower_bound=0, flag_values=VALUES
)
GENERATOR_DEVICES = flags.DEFINE_integer(
    "generator_devices", 1, "Devices of one generator.", lower_bound=1, flag_values=VALUES
)
CHIP_PRICE = flags.DEFINE_float(
    "price_per_chip_hour", 0.0, "Of the trainer's chips.", lower_bound=0.0, flag_values=VALUES
)
GENERATOR_PRICE = flags.DEFINE_float(
    "generator_price_per_hour", 0.0, "Of one generator, all its devices.", lower_bound=0.0, flag_values=VALUES
)
STEPS = flags.DEFINE_integer(
    "steps", 0, "Of the run; 0: config.max_steps, or those to --target.", lower_bound=0, flag_values=VALUES
)
FIT = flags.DEFINE_string(
    "fit", "", "fit.json that scalerl-fit has written, of one run; requires --target.", flag_values=VALUES
)
TARGET = flags.DEFINE_float(
    "target", None, "Pass rate to plan for; requires --fit.", lower_bound=0.0, upper_bound=1.0, flag_values=VALUES
)
EXPLAIN = flags.DEFINE_bool(
    "explain", False, "Print the ten most expensive places of a step, by the programs that were compiled.",
    flag_values=VALUES,
)  # fmt: skip
OUT = flags.DEFINE_string(
    "out", "", "JSON file to write: all that is printed, and what it was made from.", flag_values=VALUES
)


def define() -> None:
    """Makes them flags of the command."""
    for name in VALUES:
        if name not in flags.FLAGS:
            flags.FLAGS[name] = VALUES[name]
            flags.FLAGS.register_flag_by_module(__name__, VALUES[name])


VALUES.mark_as_parsed()
