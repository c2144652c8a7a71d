"""The flags with which scalerl-fit watches its files. No heavy imports, see cli/command_flags.py."""

from absl import flags

WATCH = flags.DEFINE_bool("watch", False, "Draw again after each evaluation, until the run has ended.")
WATCH_EVERY = flags.DEFINE_float(
    "watch_every", 5.0, "Seconds between two reads of the files.", lower_bound=0.1, upper_bound=3600.0
)
