"""Makes configs/bank.csv: the evaluations of complete runs on five tasks, for scalerl-calibrate.

    python -m tests.benchmarks.make_bank [--parallel=2] [--members=NAME,...]        from the repository's root

Writes runs/bank/, which scalerl-study makes of the study below; killed at any time, the same command goes on. Once
every run is finished, their evaluations are in configs/bank.csv, beside those of other studies that it has.

    arithmetic          ceilings 1, .91, .82, .73 and .55: shares of unanswerable prompts; longer chains
    programs            judged in the sandbox, so it needs bubblewrap
    reasoning_gym:...   spell_backward, chain_sum, letter_counting, where a model of this size levels off by itself

The traces of the reasoning-gym tasks are answers without thinking, a share of them wrong; they are made here.

Hardware   2 CPU cores, 6 GB of memory
Time       about 6 hours
"""

import copy
import json
import os
import random
import subprocess
import sys

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file, load_module
from scalerl_jax.environments import reasoning_gym
from scalerl_jax.system.files import whole_folder, write_whole

WORKDIR = os.path.join("runs", "bank")
TRACES = os.path.join(WORKDIR, "traces")
BASE = os.path.join("configs", "quickstart.py")
TABLE = os.path.join("configs", "bank.csv")
GYM = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "letter_counting": {"min_words": 2, "max_words": 2},
}
_MADE, _WRONG = 2000, 0.25  # traces, and the share that answers another question
_SEED = 1_000_000  # of the traces' questions: no run's

ablations = load_module(os.path.join("configs", "ablations.py"), "the members of the bank")
changed, recipe = ablations.changed, ablations.recipe


def bank(base: Config) -> dict[str, Config]:
    """Members by name; those of one task begin with its name. Batches and evaluations are half and a quarter of the
    base's, so that a run takes a few minutes."""
    base = changed(
        recipe(base, "scalerl"), rollout__prompts_per_step=base.rollout.prompts_per_step // 2, evaluation__samples=2,
        learner__micro_batch_rows=base.learner.micro_batch_rows // 2,
    )  # fmt: skip
    found: dict[str, Config] = {}

    def add(task: str, config: Config, **variants: dict[str, object] | float) -> None:
        """A number is a factor of the learning rate."""
        for name, fields in variants.items():
            if isinstance(fields, float):
                fields = {"optimizer__learning_rate": config.optimizer.learning_rate * fields}
            found[f"{task}-{name}"] = changed(config, **fields)

    seed_1, grpo = {"seed": 1}, _recipe_fields("deepseek_grpo")
    phased = {"pacing__kind": "phased", "pacing__max_off_policy_steps": 16}
    gspo = phased | {"objective__loss": "gspo", "objective__clip_low": 3e-3, "objective__clip_high": 4e-3,
                     "objective__aggregation": "sample"}  # fmt: skip
    collapse = phased | {"objective__loss": "reinforce", "objective__advantage_normalization": "none",
                         "optimizer__learning_rate": 12 * base.optimizer.learning_rate}  # fmt: skip
    long = {"max_steps": 3 * base.max_steps}  # to see where the others level off
    small = {"sft__layers": 2, "sft__hidden_size": 48, "sft__heads": 2, "sft__kv_heads": 1,
             "sft__intermediate_size": 96}  # fmt: skip
    large = {"sft__layers": 4, "sft__hidden_size": 192, "sft__heads": 6, "sft__kv_heads": 3,
             "sft__intermediate_size": 512}  # fmt: skip

    for share in (0.1, 0.2, 0.3, 0.5):
        capped = changed(base, environment__unanswerable=share)
        name = f"arithmetic_{100 * (1 - 0.9 * share):.0f}"
        add(name, capped, scalerl={}, seed_1=seed_1, slow=0.5, grpo=grpo, small=small)
        if share == 0.2:
            add(name, capped, gspo=gspo, collapse=collapse, large=large, long=long)
    longer = changed(
        base, environment__minimum_terms=12, environment__maximum_terms=16, rollout__max_prompt_tokens=36,
        rollout__thinking_budget_min=60, rollout__thinking_budget_max=72,
    )  # fmt: skip
    add("chains", longer, scalerl={}, fast=2.0, gspo=gspo, small=small, long=long)

    programs = changed(
        base, environment__name="programs", environment__minimum_terms=3, environment__maximum_terms=5,
        environment__verifier_processes=2, rollout__answer_budget=40,
    )  # fmt: skip
    # What has collapsed makes nats of a rounding: servers are not sent away for it.
    collapse |= {"parity__difference_limit": 10.0}
    add("programs", programs, scalerl={}, seed_1=seed_1, fast=2.0, grpo=grpo, gspo=gspo, small=small, collapse=collapse)

    for name, options in GYM.items():
        gym = changed(
            base, environment__name=reasoning_gym.NAME + name, environment__options=options,
            sft__traces=os.path.join(TRACES, f"{name}.jsonl"), sft__max_steps=500,
            optimizer__learning_rate=4 * base.optimizer.learning_rate, rollout__max_prompt_tokens=64,
            rollout__answer_budget=24, rollout__thinking_budget_min=4, rollout__thinking_budget_max=4,
            rollout__length_control="none",
        )  # fmt: skip
        add(name, gym, scalerl={}, seed_1=seed_1, fast=2.0, grpo=grpo, stall=0.02, long=long)
    return found


STUDIES = {"bank": bank}


def _recipe_fields(name: str) -> dict[str, object]:
    """What a recipe changes of any base, but its head and its control of lengths."""
    before, after = Config(), recipe(Config(), name)
    return {
        f"{group}__{field}": value
        for group in ("objective", "pacing", "curriculum")
        for field, value in vars(getattr(after, group)).items()
        if value != getattr(getattr(before, group), field)
    }


def make_traces(base: Config) -> None:
    if os.path.isdir(TRACES):
        return
    os.makedirs(WORKDIR, exist_ok=True)
    with whole_folder(TRACES) as folder:
        for name, options in GYM.items():
            config = copy.deepcopy(base)
            config.seed, config.environment.train_prompts = _SEED, _MADE
            config.environment.name, config.environment.options = reasoning_gym.NAME + name, options
            rows = list(reasoning_gym.make(config).rows("train"))
            rng = random.Random(_SEED)
            lines = []
            for row in rows:
                answer = rng.choice(rows).answer if rng.random() < _WRONG else row.answer
                lines.append(json.dumps({"prompt": row.text, "completion": f"<think></think>{answer}"}))
            write_whole(os.path.join(folder, f"{name}.jsonl"), "\n".join(lines) + "\n")


def main() -> None:
    base = load_file(BASE)
    make_traces(base)
    command = [sys.executable, "-m", "scalerl_jax.study.command", "--study=bank", f"--base={BASE}"]
    command += [f"--studies={__file__}", f"--workdir={WORKDIR}", *sys.argv[1:]]
    done = subprocess.run(command, check=False)
    if done.returncode == 0 and not any(argument.startswith("--members") for argument in sys.argv[1:]):
        write_table(set(bank(base)))
    sys.exit(done.returncode)


def write_table(members: set[str]) -> None:
    """The members' rows, behind those of other studies that the table has."""
    with open(os.path.join(WORKDIR, "evaluations.csv"), encoding="utf-8") as file:
        header, *made = file
    with open(TABLE, encoding="utf-8") as file:
        if next(file) != header:
            raise ValueError(f"{TABLE}: its columns are others than those of {WORKDIR}/evaluations.csv")
        kept = [line for line in file if line.split(",", 1)[0] not in members]
    write_whole(TABLE, "".join([header, *kept, *made]))


if __name__ == "__main__":
    main()
