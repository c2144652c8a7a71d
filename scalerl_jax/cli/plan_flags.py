"""The flags of scalerl-plan. No heavy imports, see cli/command_flags.py."""

from absl import flags

# Kept apart until `define`: other commands also have --out, --target and others, and one process may import several of
# these modules.
VALUES = flags.FlagValues()

TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Chips to plan for: v5e:8x8, v5p:4x4x4 or v6e:8x8 as a TPU slice is named; h100:8, h200:2x8 or "
    "b200:8 for nodes x GPUs of each.", flag_values=VALUES
)  # fmt: skip
SLICES = flags.DEFINE_integer(
    "slices", 1, "TPU slices, joined by the data center's network.", lower_bound=1, flag_values=VALUES
)
MODEL_CONFIG = flags.DEFINE_string(
    "model_config", "", "config.json of the policy, or its folder. Default: that of config.model.path or of "
    "config.sft.model_file, or NAME.json beside the config file NAME.py.", flag_values=VALUES,
)  # fmt: skip
COMPILES = flags.DEFINE_integer(
    "compiles", 4, "Most layouts to compile in search of one that fits; 0: no search.",
    lower_bound=0, flag_values=VALUES,
)  # fmt: skip
PEAK_SHARE = flags.DEFINE_float(
    "peak_share", 1.0, "Share of the chip's peak rate that matrix products reach; 1 is the roofline itself.",
    lower_bound=0.01, upper_bound=1.0, flag_values=VALUES,
)  # fmt: skip
PROMPT_TOKENS = flags.DEFINE_float(
    "prompt_tokens", 256.0, "Mean length of a prompt, in tokens.", lower_bound=1.0, flag_values=VALUES
)
COMPLETION_TOKENS = flags.DEFINE_float(
    "completion_tokens", 0.0, "Mean length of a completion, in tokens; 0: half of the thinking and answer budgets.",
    lower_bound=0.0, flag_values=VALUES,
)  # fmt: skip
ROW_USE = flags.DEFINE_float(
    "row_use", 0.95, "Share of a packed row that is filled (row_use in metrics.jsonl).",
    lower_bound=0.01, upper_bound=1.0, flag_values=VALUES,
)  # fmt: skip
TOKENS_PER_SECOND = flags.DEFINE_float(
    "generator_tokens_per_second", 0.0, "Tokens that one generator samples in a second; 0: generators are not counted.",
    lower_bound=0.0, flag_values=VALUES,
)  # fmt: skip
GENERATOR = flags.DEFINE_string(
    "generator", "", "Machine of generators with the JAX engine, one on each device, as in h100:1 or v5p:2x2x1. Their "
    "programs are compiled for it, with the slots and lengths of the config.", flag_values=VALUES,
)  # fmt: skip
GENERATORS = flags.DEFINE_integer(
    "generators", 0, "Number of generators; 0: as many as keep the trainer busy.", lower_bound=0, flag_values=VALUES
)
GENERATOR_DEVICES = flags.DEFINE_integer(
    "generator_devices", 1, "Devices of one generator.", lower_bound=1, flag_values=VALUES
)
CHIP_PRICE = flags.DEFINE_float(
    "price_per_chip_hour", 0.0, "Price of an hour of one of the trainer's chips.", lower_bound=0.0, flag_values=VALUES
)
GENERATOR_PRICE = flags.DEFINE_float(
    "generator_price_per_hour", 0.0, "Price of an hour of one generator with all its devices.",
    lower_bound=0.0, flag_values=VALUES,
)  # fmt: skip
STEPS = flags.DEFINE_integer(
    "steps", 0, "Steps of the run; 0: config.max_steps, or those to --target.", lower_bound=0, flag_values=VALUES
)
FIT = flags.DEFINE_string(
    "fit", "", "fit.json of one run, written by scalerl-fit; requires --target.", flag_values=VALUES
)
TARGET = flags.DEFINE_float(
    "target", None, "Pass rate to plan for; requires --fit.", lower_bound=0.0, upper_bound=1.0, flag_values=VALUES
)
EXPLAIN = flags.DEFINE_bool(
    "explain", False, "Print the ten most expensive places of a step, from the compiled programs.", flag_values=VALUES
)
OUT = flags.DEFINE_string("out", "", "JSON file to write: all that is printed, and the inputs.", flag_values=VALUES)


def define() -> None:
    """Adds them to the command's flags."""
    for name in VALUES:
        if name not in flags.FLAGS:
            flags.FLAGS[name] = VALUES[name]
            flags.FLAGS.register_flag_by_module(__name__, VALUES[name])


VALUES.mark_as_parsed()
