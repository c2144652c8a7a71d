"""The game of configs/game.py as a class for TRL's environment_factory: bench_trl_episodes.py has both sides play it.

Nothing of this project is imported above: TRL's environment has none of it.
"""

from typing import Any

NUMBERS, GUESSES = 7, 3


class Guessing:
    """An episode: a number from 1 to 7 is to be found in three guesses."""

    def reset(self, number: int, **row: Any) -> None:
        self._number, self._guesses, self._found = number, 0, False

    def guess(self, number: int) -> str:
        """Compares a guess with the number.

        Args:
            number: the guess
        """
        self._guesses += 1
        self._found = self._found or (number == self._number and self._guesses <= GUESSES)
        if self._found or self._guesses >= GUESSES:
            return "over"
        return "+" if number < self._number else "-"

    def get_reward(self) -> float:
        return 1.0 if self._found else -1.0


def game(config: Any) -> Any:
    """Of this project; its rows are the file config.environment.train."""
    from scalerl_jax.environments.adapters import TRL

    return TRL(Guessing, config, rows=config.train)
