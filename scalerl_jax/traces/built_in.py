"""Traces of the environments that generate their own problems, generated on demand.

    draw(rng, environment, *, validation) -> problem with a text
    trace(problem, rng, *, error_rate, phrase) -> pieces of the completion

An environment whose file has these two functions is a row of BUILT_IN. In a mixture the environments listed there give
the traces, by their weights; the traces of an update are a function of (seed, update).
"""

from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import arithmetic, made_problems, parts, programs
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.made_problems import Piece
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.traces.conversations import continued, end_of_turn
from scalerl_jax.traces.example import Example, fill, join

BUILT_IN: dict[str, ModuleType] = {"arithmetic": arithmetic, "programs": programs}
_STREAM, _EVALUATION = 3, 5  # random streams, distinct from those of the environments and of a new decoder


def makers(config: Config) -> list[Config]:
    """The config of each environment of the run that generates its problems. Raises ValueError if there is none."""
    there = parts.configs(config)
    found = {name: part for name, part in there.items() if part.environment.name in BUILT_IN}
    if not found:
        names = ", ".join(part.environment.name for part in there.values())
        raise ValueError(
            f"config.sft.traces: none are given, and {names} makes none of its own ({', '.join(BUILT_IN)} would)"
        )
    for name, part in found.items():
        least, most = part.environment.minimum_terms, part.environment.maximum_terms
        if least > most:
            fields = [parts.field(name, field) for field in ("minimum_terms", "maximum_terms")]
            raise ValueError(f"{fields[0]}={least}: must not be above {fields[1]}, {most}")
    return list(found.values())


def corpus(config: Config) -> Iterator[str]:
    """Texts from which a new tokenizer is made."""
    for part in makers(config):
        module = BUILT_IN[part.environment.name]
        phrase = config.rollout.interruption_text
        yield from made_problems.corpus(module.draw, module.trace, part.environment, seed=config.seed, phrase=phrase)


class BuiltInTraces:
    """Generated traces of training problems. Raises ValueError where the config has no environment of BUILT_IN."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        # Traces contain interruptions only if the run will interrupt.
        rollout = config.rollout
        interrupts = rollout.length_control == "interrupt" and rollout.thinking_budget_max > 0
        self._phrase = rollout.interruption_text if interrupts else ""
        found = makers(config)
        self._environments = [part.environment for part in found]
        self._prompts = [Prompts(part, tokenizer) for part in found]
        self._ends = [  # "": the first of the stop tokens
            end_of_turn(prompts, tokenizer) if part.environment.chat_template == "always" else ""
            for part, prompts in zip(found, self._prompts, strict=True)
        ]
        weights = np.asarray([environment.weight for environment in self._environments])
        self._weights = weights / weights.sum()
        # Lines for the user on how the traces end; none are left out.
        rendered = [one for one, part in zip(self._prompts, found) if part.environment.chat_template == "always"]
        unknown = [prompts.template().unknown_end(tokenizer) for prompts in rendered]
        self.notes = list(dict.fromkeys(filter(None, unknown)))
        self.longest = config.sft.seq_len + 1  # upper bound, in tokens
        if [environment.name for environment in self._environments] == ["arithmetic"]:
            self.longest = self._longest_chain(self._environments[0])

    def batch(self, update: int) -> list[Example]:
        """The traces of one update. Raises ValueError where a trace does not fit into a row."""
        sft = self._config.sft
        rng = np.random.default_rng([self._config.seed, _STREAM, update])
        examples = self._examples(rng, validation=False)
        return fill(examples, lambda e: len(e.tokens) - 1, rows=sft.rows_per_step, length=sft.seq_len)

    def evaluation(self) -> list[Example]:
        """config.sft.evaluation_traces of held-out problems, the same at every evaluation."""
        examples = self._examples(np.random.default_rng([self._config.seed, _EVALUATION]), validation=True)
        return [next(examples) for _ in range(self._config.sft.evaluation_traces)]

    def _examples(self, rng: np.random.Generator, *, validation: bool) -> Iterator[Example]:
        sft = self._config.sft
        while True:
            which = int(rng.choice(len(self._weights), p=self._weights)) if len(self._weights) > 1 else 0
            environment = self._environments[which]
            module = BUILT_IN[environment.name]
            problem = module.draw(rng, environment, validation=validation)
            pieces = module.trace(problem, rng, error_rate=sft.error_rate, phrase=self._phrase)
            asked = self._prompts[which].render(Row(problem.text, name=f"problem {problem.text}"))
            example = self._tokenize(asked, pieces, self._ends[which])
            if len(example.tokens) - 1 > sft.seq_len:
                raise ValueError(
                    f"config.sft.seq_len={sft.seq_len}: a trace of {environment.name} has {len(example.tokens)} tokens"
                )
            yield example

    def _tokenize(self, asked: Row, pieces: Sequence[Piece], end_of_turn: str) -> Example:
        encode, end = self._tokenizer.encode, self._config.rollout.end_of_thinking
        texts = [piece.text for piece in pieces]
        whole = "".join(texts)
        texts[0] = texts[0][len(whole) - len(continued(asked.text, whole, end)) :]  # the marker is in the first
        texts[-1] += end_of_turn
        trained = [piece.trained for piece in pieces]
        return join(asked.token_ids.tolist(), [encode(text) for text in texts], trained, self._tokenizer)

    def _longest_chain(self, environment: EnvironmentConfig) -> int:
        encode = self._tokenizer.encode
        term = len(encode("+9=9")) + len(encode("+9"))
        asked = self._prompts[0].render(Row("9=", name="problem 9="))
        fixed = self._tokenize(asked, [Piece("<think>9" + self._phrase + "</think>9")], self._ends[0])
        return len(fixed.tokens) + term * (environment.maximum_terms - 1)
