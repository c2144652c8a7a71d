"""The flags of scalerl-study. No heavy imports, see command_flags.py."""

import re

from absl import flags

FOR_LAUNCH: list[str] = []  # with --render: the flags of scalerl-launch
STUDY = flags.DEFINE_list("study", [], "Names of studies in --studies, with commas between.")
BASE = flags.DEFINE_string("base", "", "Python file whose get_config() returns the base of all members.")
STUDIES = flags.DEFINE_string(
    "studies", "", "Python file whose STUDIES make the members from the base. Default: ablations.py beside --base or "
    "above it, else configs/ablations.py.",
)  # fmt: skip
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the study. A study found there is continued.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each member, with its seed and the following ones.", lower_bound=1)
MEMBERS = flags.DEFINE_list("members", [], "Names of the members to run. Empty: all.")
PARALLEL = flags.DEFINE_integer(
    "parallel", 1, "Members that run at a time, each on its share of the cores and GPUs.", lower_bound=1
)
RENDER = flags.DEFINE_enum(
    "render", "", ["", "kubernetes", "slurm"], "Write launch files for every member instead of running it; takes the "
    "flags of scalerl-launch too.",
)  # fmt: skip
RESULTS_ONLY = flags.DEFINE_bool("results_only", False, "Run nothing; print the results of the runs so far.")
X = flags.DEFINE_string(
    "x", "typical_hours", "Compute: typical_hours (steps times the run's median device_hours of a step), or a column "
    "of evals.jsonl such as device_hours, model_flops or step.",
)  # fmt: skip
BASELINE = flags.DEFINE_string("baseline", "", "Member that the others are compared with. Default: the study's first.")


def move_launch_flags(argv: list[str]) -> None:
    """With --render: moves flags that this process does not define from `argv` to FOR_LAUNCH."""
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
