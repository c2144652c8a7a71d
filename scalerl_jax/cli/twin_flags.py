"""The flags of scalerl-plan for a fleet: how many generators, how far off-policy. Apart from what reads them, see
cli/command_flags.py."""

from absl import flags

from scalerl_jax.cli.plan_flags import VALUES, define  # noqa: F401  these are among them

RUN = flags.DEFINE_string(
    "run", "", "Folder of a run: a simulation of its trainer and generators is fitted to what it measured, and says "
    "what other numbers of generators would do. In the place of --topology.", flag_values=VALUES
)  # fmt: skip
SERVERS = flags.DEFINE_list("servers", ["1", "2", "3", "4"], "Numbers of generators to simulate.", flag_values=VALUES)
OFF_POLICY = flags.DEFINE_list(
    "max_off_policy_steps", [], "Values of config.pacing.max_off_policy_steps to simulate. Default: the run's, or the "
    "config's.", flag_values=VALUES
)  # fmt: skip
CORES = flags.DEFINE_string(
    "cores", "", "Cores of one machine that trainer and generators share: 8, or 4+4 where the trainer is pinned to the "
    "first and the generators to the others. Default: each has hardware of its own.", flag_values=VALUES
)  # fmt: skip
USED = flags.DEFINE_float(
    "cores_used",
    0.0,
    "Share of these cores that other programs took during the run.",
    lower_bound=0.0,
    upper_bound=0.95,
    flag_values=VALUES,
)
LENGTHS = flags.DEFINE_string(
    "lengths_quantiles", "", "Tokens of completions as SHARE:TOKENS,..., 0.5:4000,0.9:11000,1:14000 for example, the "
    "last of share 1. Default: those of the run.", flag_values=VALUES
)  # fmt: skip
TOKENS_PER_SECOND = flags.DEFINE_float(
    "tokens_per_second",
    None,
    "Of one generator with all its slots taken. Default: as the run was.",
    lower_bound=1e-9,
    flag_values=VALUES,
)
FIXED_SHARE = flags.DEFINE_float(
    "decode_fixed_share", None, "Of the time of a decode step with all slots taken: the share that it takes with a "
    "single one as well, mostly to read the weights. Default: as the run was; without one 1.",
    lower_bound=0.0, upper_bound=1.0, flag_values=VALUES
)  # fmt: skip
SLOTS = flags.DEFINE_integer(
    "slots",
    None,
    "Completions that a generator samples at once. Default: config.fleet.slots.",
    lower_bound=1,
    flag_values=VALUES,
)
STEP_SECONDS = flags.DEFINE_float(
    "step_seconds",
    None,
    "Of an update, on the trainer's devices. Default: as the run was.",
    lower_bound=1e-9,
    flag_values=VALUES,
)
PUSH_SECONDS = flags.DEFINE_float(
    "push_seconds", None, "From an update until a generator decodes with it. Default: 0; of a run it is within its "
    "other speeds.", lower_bound=0.0, flag_values=VALUES
)  # fmt: skip
TRAINER_DEVICES = flags.DEFINE_float(
    "trainer_devices", 1.0, "That a step is paid for.", lower_bound=0.0, flag_values=VALUES
)
SERVER_DEVICES = flags.DEFINE_float(
    "server_devices", 1.0, "Of one generator, likewise.", lower_bound=0.0, flag_values=VALUES
)
SEED = flags.DEFINE_integer(
    "seed", 0, "Of the simulation: the same one gives the same table.", lower_bound=0, flag_values=VALUES
)

# What a simulation needs where there is no run to take it from.
OF_NO_RUN = {"lengths_quantiles": LENGTHS, "tokens_per_second": TOKENS_PER_SECOND, "step_seconds": STEP_SECONDS}


def wanted() -> bool:
    """Whether the flags ask for a simulation."""
    return bool(RUN.value) or any(flag.value for flag in OF_NO_RUN.values())
