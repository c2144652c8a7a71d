"""The recipes and ablations of arXiv 2510.13786: what each is, and that each runs."""

import pathlib
from typing import Any

import pytest

from scalerl_jax.config import Config
from scalerl_jax.config_check import check, leaves
from scalerl_jax.config_io import load_file, load_module
from tests.support.paths import ROOT
from tests.support.runs import CONFIG
from tests.train.conftest import flags, model, start, task  # noqa: F401  fixtures

PAPER, QUICKSTART = (str(ROOT / "configs" / f"{name}.py") for name in ("scalerl_8b", "quickstart"))


ABLATIONS = load_module(str(ROOT / "configs" / "ablations.py"), "ablations")
STUDIES = ABLATIONS.STUDIES

# Of the table in A.17: loss, its limits, aggregation, off-policy, completions, filter, head, normalization.
TABLE = {
    "scalerl": ("cispo", 5.0, "prompt", ("pipeline", 8), 768, True, "default", "batch"),
    "deepseek_grpo": ("clip", (0.2, 0.2), "sample", ("phased", 8), 768, False, "bfloat16", "prompt"),
    "qwen_dapo": ("clip", (0.2, 0.26), "prompt", ("phased", 8), 1280, True, "bfloat16", "prompt"),
    "magistral": ("clip", (0.2, 0.26), "prompt", ("pipeline", 8), 1280, True, "bfloat16", "batch"),
    "minimax_m1": ("cispo", 5.0, "prompt", ("phased", 8), 1280, True, "default", "prompt"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_is_its_row(name: str) -> None:
    config = load_file(str(ROOT / "configs" / "recipes" / f"{name}.py"))
    objective, rollout = config.objective, config.rollout
    limits = objective.max_ratio if objective.loss == "cispo" else (objective.clip_low, objective.clip_high)
    assert TABLE[name] == (
        objective.loss, limits, objective.aggregation, (config.pacing.kind, config.pacing.max_off_policy_steps),
        rollout.prompts_per_step * rollout.group_size, objective.filter_zero_variance, config.model.head_precision,
        objective.advantage_normalization,
    )  # fmt: skip
    assert rollout.group_size == 16 and config.learner.seq_len == 16_384
    assert (rollout.max_prompt_tokens, rollout.thinking_budget_max, rollout.answer_budget) == (2048, 12_000, 2048)
    assert (config.curriculum.no_positive_resampling_at == 0.9) == (name == "scalerl")
    # What neither the row nor the paper touches is ScaleRL's.
    same = leaves(load_file(PAPER))
    touched = "loss max_ratio clip_low clip_high aggregation advantage_normalization filter_zero_variance".split()
    free = {f"objective.{field}" for field in touched} | {
        "pacing.kind", "rollout.prompts_per_step", "curriculum.no_positive_resampling_at", "model.head_precision",
    }  # fmt: skip
    assert {field for field, value in leaves(config).items() if value != same[field]} <= free


def differences(one: Config, other: Config) -> dict[str, Any]:
    theirs = leaves(other)
    return {field: value for field, value in leaves(one).items() if value != theirs[field]}


def test_the_leave_one_out_study_takes_back_one_choice_each() -> None:
    members = STUDIES["leave_one_out"](load_file(PAPER))
    scalerl = members.pop("scalerl")
    assert differences(scalerl, load_file(PAPER)) == {}
    assert {name: differences(member, scalerl) for name, member in members.items()} == {
        "prompt_normalization": {"objective.advantage_normalization": "prompt"},
        "length_penalty": {"rollout.length_control": "penalty"},
        "full_batch": {"objective.filter_zero_variance": False},
        "phased_8": {"pacing.kind": "phased"},
        "no_fp32_head": {"model.head_precision": "bfloat16"},
        "sample_average": {"objective.aggregation": "sample"},
        "uniform_sampling": {"curriculum.no_positive_resampling_at": 2.0, "curriculum.sampling": "uniform"},
        "dapo_loss": {"objective.loss": "clip"},
    }


def test_the_scaling_axes_at_the_papers_size() -> None:
    members = STUDIES["scaling"](load_file(PAPER))
    sizes = {name: (m.rollout.prompts_per_step, m.rollout.group_size) for name, m in members.items()}
    assert sizes == {
        "scalerl": (48, 16), "long_thinking": (48, 16), "small_batch": (32, 16), "large_batch": (128, 16),
        "half_groups": (96, 8), "half_larger_groups": (32, 24), "double_groups": (24, 32),
    }  # fmt: skip
    longest = members["long_thinking"]
    assert longest.rollout.thinking_budget_max == 32_000 and longest.learner.seq_len == 36_480


@pytest.mark.parametrize("base", [PAPER, QUICKSTART, str(CONFIG)], ids=["8B", "quickstart", "tiny"])
@pytest.mark.parametrize("study", STUDIES)
def test_every_member_can_be(study: str, base: str) -> None:
    config = load_file(base)
    before = leaves(config)
    members = STUDIES[study](config)
    assert leaves(config) == before, "the base stays as it is"
    for member in members.values():
        check(member)
    seen = [tuple(sorted((k, str(v)) for k, v in leaves(member).items())) for member in members.values()]
    assert len(set(seen)) == len(seen), "no two members are the same"


def runs() -> list[Any]:
    """Each once, where members of several studies are the same run. One of them in `make test-full`."""
    out, known = [], list[dict[str, Any]]()
    tiny = load_file(str(CONFIG))
    base = ABLATIONS.changed(  # so that some prompts teach
        tiny, rollout__prompts_per_step=6, rollout__group_size=8, objective__truncated="penalize"
    )
    for study in STUDIES:
        for name, member in STUDIES[study](base).items():
            changes = differences(member, tiny)
            if changes not in known:
                known.append(changes)
                marks = [] if name == "scalerl" else [pytest.mark.long]
                out.append(pytest.param(changes, id=f"{study}, {name}", marks=marks))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("changes", runs())
def test_it_starts_trains_and_goes_on(tmp_path: pathlib.Path, flags, start, changes: dict[str, Any]) -> None:  # noqa: F811
    given = [*flags, *(f"--config.{field}={value}" for field, value in changes.items())]
    start(tmp_path, *given, "--config.max_steps=3", "--config.checkpoint.every=1").finish()
    run = start(tmp_path, *given, "--config.max_steps=5", "--config.checkpoint.every=1").finish()
    assert "going on from step 3 of 5" in run.output()
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    # A policy of ten words that nobody interrupts never answers, and then no prompt has anything to teach.
    assert run.metrics[-1]["optimizer_step"] == sum(row["prompts_surviving"] > 0 for row in run.metrics)
