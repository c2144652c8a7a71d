"""The flags of scalerl-study. Apart from what reads them, see command_flags.py."""

import re

from absl import flags

FOR_LAUNCH: list[str] = []  # with --render: the flags that are not the study's but scalerl-launch's
STUDY = flags.DEFINE_list("study", [], "Studies of --studies, by name, with commas between.")
BASE = flags.DEFINE_string("base", "", "Python file whose get_config() returns the base of all members.")
STUDIES = flags.DEFINE_string(
    "studies", "", "Python file whose STUDIES makes the members from the base; default: ablations.py beside --base or "
    "above it, else configs/ablations.py.",
)  # fmt: skip
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the study; a study found there goes on.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each member, with its seed and the ones after it.", lower_bound=1)
MEMBERS = flags.DEFINE_list("members", [], "Members to run, by name; none: all.")
PARALLEL = flags.DEFINE_integer(
    "parallel", 1, "Members at a time, each on its share of the cores and of the GPUs.", lower_bound=1
)
RENDER = flags.DEFINE_enum(
    "render", "", ["", "kubernetes", "slurm"], "Write the launch files of every member in the place of running it; the "
    "flags of scalerl-launch go with it.",
)  # fmt: skip
RESULTS_ONLY = flags.DEFINE_bool("results_only", False, "Run nothing: tell what came of what has run by now.")
X = flags.DEFINE_string(
    "x", "typical_hours", "Compute: typical_hours (step times a run's median device_hours a step) or a column of "
    "evals.jsonl, such as device_hours, model_flops, step.",
)  # fmt: skip
BASELINE = flags.DEFINE_string("baseline", "", "Member that the others are compared with; default: a study's first.")


def move_launch_flags(argv: list[str]) -> None:
    """With --render: moves what is no flag of this process from `argv` to FOR_LAUNCH."""
    if not any(re.match("--?render(=|$)", item) for item in argv):
        return
    rest = argv[1:]
    argv[1:] = []
    while rest:
        item = rest.pop(0)
        name = item.lstrip("-").partition("=")[0]
        known = name in flags.FLAGS or name.removeprefix("no") in flags.FLAGS
        if known or not item.startswith("-") or name.partition(".")[0] == "config" or name in ("help", "h", "?"):
            argv.append(item)
            continue
        FOR_LAUNCH.append(item)
        if "=" not in item and rest and not rest[0].startswith("-"):
            FOR_LAUNCH.append(rest.pop(0))
