"""The work of one step of a run for the trainer and the generators, from its config.

    tokens of a step     completions x (mean prompt + mean completion)
    micro-batches        tokens / (rows x seq_len x row use), rounded up; at least one

Mean lengths depend on the run (scalerl-report shows them): if none is given, completions are assumed to be half as long
as the longest possible.

The decoder's shape needs only a config.json, not the weights. It is searched in this order: --model_config;
config.model.path, if that folder exists; config.sft.model_file; NAME.json next to the config file NAME.py.
"""

import dataclasses
import math
import os

from launch import machines
from launch.machines import Machine
from launch.settings import maximum_tokens
from scalerl_jax.config import Config
from scalerl_jax.model.decoder_config import DecoderConfig, config_of_file, read_config
from scalerl_jax.run.ledger import ModelShape


@dataclasses.dataclass(frozen=True)
class Workload:
    completions: int  # of a step
    prompt_tokens: float  # mean
    completion_tokens: float  # mean
    longest: int  # tokens of the longest possible sequence
    row_use: float  # share of a packed row that segments fill
    reference: bool = False  # a reference policy scores the training tokens
    adapted: bool = False  # an adapter is trained

    @property
    def tokens(self) -> float:
        """Tokens that a step trains on, prompts included."""
        return self.completions * (self.prompt_tokens + self.completion_tokens)

    @property
    def sampled(self) -> float:
        """Tokens that generators sample for a step."""
        return self.completions * self.completion_tokens

    @property
    def attended(self) -> float:
        """Keys of a query on average, itself included; all sequences are assumed to have the mean length."""
        return (self.prompt_tokens + self.completion_tokens + 1) / 2

    def micro_batches(self, *, rows: int, seq_len: int) -> int:
        """Micro-batches of a step. rows: of one micro-batch on the whole mesh."""
        return max(1, math.ceil(self.tokens / (rows * seq_len * self.row_use) - 1e-9))

    def model_flops(self, decoder: DecoderConfig) -> float:
        """FLOPs of a step's update, as a run's ledger counts them; all completions are assumed to have mean length."""
        length = self.prompt_tokens + self.completion_tokens
        shape = ModelShape.of(decoder, adapted=self.adapted)
        return self.completions * shape.update_flops([length], reference=self.reference)

    def sampling_flops(self, decoder: DecoderConfig) -> float:
        """FLOPs of a step's rollouts, likewise: each token sampled once; reading a prompt once a group is left out."""
        length, prompt = self.prompt_tokens + self.completion_tokens, self.prompt_tokens
        shape = ModelShape.of(decoder)
        context = shape.context(length) - shape.context(prompt)
        return self.completions * shape.forward_flops(tokens=self.completion_tokens, context=context)


def of(config: Config, *, prompt_tokens: float, completion_tokens: float, row_use: float) -> Workload:
    """completion_tokens: 0 means half of the longest. Raises ValueError where a sequence does not fit into a row."""
    rollout, seq_len = config.rollout, config.learner.seq_len
    most, budgets = rollout.thinking_budget_max + rollout.answer_budget, "thinking and answer budgets"
    if rollout.max_turns > 1:
        most, budgets = rollout.max_episode_tokens, "config.rollout.max_episode_tokens"
    if rollout.max_prompt_tokens + most > seq_len + 1:
        raise ValueError(
            f"config.learner.seq_len={seq_len}: a prompt and its completion may have "
            f"{rollout.max_prompt_tokens + most} tokens (longest prompt, {budgets})"
        )
    if completion_tokens > most:
        raise ValueError(
            f"--completion_tokens={completion_tokens:g}: is above what a completion may have, {most} ({budgets})"
        )
    if prompt_tokens > rollout.max_prompt_tokens:
        raise ValueError(
            f"--prompt_tokens={prompt_tokens:g}: is above config.rollout.max_prompt_tokens={rollout.max_prompt_tokens}"
        )
    return Workload(
        completions=rollout.prompts_per_step * rollout.group_size,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens or most / 2,
        longest=min(seq_len, maximum_tokens(config)),
        row_use=row_use,
        reference=config.objective.reference_kl > 0,
        adapted=config.lora.rank > 0,
    )


def find_decoder(config: Config, *, config_file: str, model_config: str) -> tuple[DecoderConfig, str]:
    """(shape, the file it is from). Raises ValueError, one line, where there is none, and OSError.

    config_file: value of --config; may be "". model_config: value of --model_config, a file or a folder.
    """
    if model_config:
        if os.path.isdir(model_config):
            return read_config(model_config), os.path.join(model_config, "config.json")
        if not os.path.isfile(model_config):
            raise ValueError(f"--model_config={model_config}: no such file")
        return config_of_file(model_config), model_config
    if config.model.path and os.path.isfile(os.path.join(config.model.path, "config.json")):
        return read_config(config.model.path), os.path.join(config.model.path, "config.json")
    beside = os.path.splitext(config_file)[0] + ".json" if config_file else ""
    for file in (config.sft.model_file, beside):
        if file and os.path.isfile(file):
            return config_of_file(file), file
    raise ValueError(
        f"config.model.path={config.model.path}: no config.json there, so the decoder's shape is not known: "
        "--model_config=FILE names one"
    )


def find_machine(topology: str, slices: int, *, flag: str = "topology") -> Machine:
    """The machine of --topology and --slices. Raises ValueError, one line, where there is no such machine, or its
    figures are not known."""
    machine = machines.of_flag(flag, topology, slices=slices)
    if not machine.chip.memory:
        known = ", ".join(name for name, chip in machines.CHIPS.items() if chip.memory)
        raise ValueError(f"--{flag}={topology}: a plan needs the figures of a chip, which are known of {known}")
    return machine
