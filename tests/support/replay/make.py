"""The replay engine's flags, and how scalerl-serve makes it."""

import dataclasses
from typing import TYPE_CHECKING

from absl import flags

from rollout_server.engines.make import UsageError, check_folder

if TYPE_CHECKING:
    from rollout_server.engines.engine import Engine, EngineOptions

FILE = flags.DEFINE_string("replay_file", "", "JSONL of completions to play; empty: made up by a hash.")
VOCABULARY = flags.DEFINE_integer("replay_vocabulary", 256, "Made-up tokens are below this.", lower_bound=1)
MEAN_TOKENS = flags.DEFINE_float("replay_mean_tokens", 24.0, "Mean length of what is made up.", lower_bound=2)
TOKEN_SECONDS = flags.DEFINE_float("replay_token_seconds", 0.0, "Time of one decode step.", lower_bound=0)
LOAD_SECONDS = flags.DEFINE_float("replay_load_seconds", 0.0, "Pause at new weights.", lower_bound=0)
CRASH_AFTER = flags.DEFINE_integer("replay_crash_after", 0, "Die after so many completions.", lower_bound=0)
HANG_AFTER = flags.DEFINE_integer("replay_hang_after", 0, "Hang after so many completions.", lower_bound=0)


async def make(options: "EngineOptions") -> "Engine":
    """With --model it passes for a server of this model: its tensors, its config, its tokenizer.

    Raises UsageError or ValueError in one line.
    """
    if options.router_replay:
        raise UsageError("--router_replay: what is played has no experts to tell")
    if options.model:
        check_folder(options.model, weights=False)
    from rollout_server.engines.engine_info import engine_info
    from scalerl_jax.model.decoder_config import read_config
    from tests.support.replay.engine import Faults, ReplayEngine
    from tests.support.replay.scripts import Recorded, Script, Scripted

    info = engine_info("replay", options, read_config(options.model) if options.model else None)
    script: Script
    if FILE.value:
        script = Recorded(FILE.value)
        info = dataclasses.replace(info, maximum_top_k=0)
    else:
        script = Scripted(vocabulary=VOCABULARY.value, mean_tokens=MEAN_TOKENS.value)
    return ReplayEngine(
        script,
        dataclasses.replace(info, maximum_tokens=options.maximum_tokens),  # no positions bound what is only played
        decode_chunk=options.decode_chunk,
        token_seconds=TOKEN_SECONDS.value,
        load_seconds=LOAD_SECONDS.value,
        faults=Faults(crash_after=CRASH_AFTER.value, hang_after=HANG_AFTER.value),
    )
