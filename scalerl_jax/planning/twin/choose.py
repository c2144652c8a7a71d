"""Simulations of several fleets, and which of them to take."""

import dataclasses
from collections.abc import Iterable, Sequence

from scalerl_jax.planning.twin.outcome import Outcome
from scalerl_jax.planning.twin.simulation import Scenario, simulate

AS_FAST = 0.01  # of the steps per hour: what more generators must bring at least


@dataclasses.dataclass(frozen=True)
class Choice:
    fastest: Outcome  # of those within AS_FAST of the most steps per hour, that with the fewest generators
    cheapest: Outcome  # of the fewest device-hours a step


def sweep(
    scenario: Scenario, *, servers: Iterable[int], off_policy: Sequence[int], steps: int, seed: int = 0
) -> list[Outcome]:
    """Of each number of generators and each k, the k in the inner loop. steps: that each outcome tells of, about.

    Raises ValueError where one of them cannot be.
    """
    found = []
    for count in servers:
        for k in off_policy:
            recipe = dataclasses.replace(scenario.recipe, max_off_policy_steps=k)
            first, last = simulated_steps(scenario, k, steps)
            found.append(
                simulate(
                    dataclasses.replace(scenario, servers=count, recipe=recipe), steps=last, first=first, seed=seed
                )
            )
    return found


def simulated_steps(scenario: Scenario, k: int, steps: int) -> tuple[int, int]:
    """(first, last): after as many as it takes to be k ahead, `steps` or more; evaluations and phases are whole."""
    recipe = scenario.recipe
    whole = k if recipe.kind == "phased" else 1
    # An evaluation that comes once in hundreds of steps is not waited for in a simulation.
    often = recipe.evaluation_every if 0 < recipe.evaluation_every <= steps else 1
    unit = whole * often
    first = -(-(k + 2) // unit) * unit
    return first, first + max(2, -(-steps // unit)) * unit


def choose(outcomes: Sequence[Outcome], *, trainer_devices: float, server_devices: float) -> Choice:
    most = max(outcome.steps_per_hour for outcome in outcomes)
    fast = [outcome for outcome in outcomes if outcome.steps_per_hour >= (1 - AS_FAST) * most]
    return Choice(
        # Fewer generators, then less staleness.
        fastest=min(fast, key=lambda o: (o.servers, o.mean_staleness)),
        cheapest=min(
            outcomes,
            key=lambda o: (
                round(o.hours_per_step(trainer_devices=trainer_devices, server_devices=server_devices), 9),
                o.mean_staleness,
            ),
        ),
    )
