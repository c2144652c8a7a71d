"""A run folder as a trainer writes it, out of a simulation: its speeds are known."""

import json
import pathlib

import numpy as np

from scalerl_jax import config_io
from scalerl_jax.config import Config
from scalerl_jax.planning.twin.simulation import Scenario, Simulation


def write_simulated_run(
    folder: pathlib.Path, scenario: Scenario, *, config: Config, steps: int, quantiles: bool = True
) -> str:
    """config.json and metrics.jsonl; its path. quantiles: rows say how long completions are."""
    simulation = Simulation(scenario, steps=steps, seed=1)
    simulation.run(0)
    (folder / "config.json").write_text(config_io.to_json(config))
    recipe, trainer = scenario.recipe, scenario.trainer
    in_training = recipe.prompts_per_step * recipe.group_size
    in_evaluation = recipe.evaluation_prompts * recipe.evaluation_samples
    lengths = scenario.lengths.draw(np.random.default_rng(0), 10_000)
    rows, sampled, evaluated = [], 0, 0
    for step, (before, mark) in enumerate(zip(simulation.marks, simulation.marks[1:]), 1):
        behind, update = simulation.updates[step - 1]
        idle = mark.now - mark.trainer_busy - mark.trainer_evaluation
        waited = idle - (before.now - before.trainer_busy - before.trainer_evaluation) - trainer.between_seconds
        sampled += simulation.staleness[step - 1].total()
        evaluated += in_evaluation * float(scenario.lengths.mean) * behind
        work = (trainer.update_seconds + trainer.behind_seconds * behind) * trainer.cores
        row = {
            "step": step,
            "time": 1_795_000_000 + mark.now,
            "incarnation": 1,
            "lags": {str(age): tokens for age, tokens in simulation.staleness[step - 1].items()},
            "waited_seconds": max(0.0, waited),
            "update_seconds": update,
            "cpu_seconds": work + trainer.completion_seconds * (in_training + in_evaluation * behind),
            "length_mean": float(scenario.lengths.mean),
            "compute": {
                "trainer_busy_hours": mark.trainer_busy / 3600,
                "trainer_idle_hours": idle / 3600,
                "trainer_evaluation_hours": mark.trainer_evaluation / 3600,
                **{
                    f"generator_{part}_hours": sum(getattr(server, part) for server in mark.servers) / 3600
                    for part in ("busy", "idle", "evaluation")
                },
                "sampled_tokens": sampled,
                "evaluation_tokens": evaluated,
            },
        }
        if quantiles:
            row["length_quantiles"] = np.quantile(lengths, np.linspace(0, 1, 11)).tolist()
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)
