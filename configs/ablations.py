"""What arXiv 2510.13786 compares, and what came after it, as changes of any base config.

    members = STUDIES["leave_one_out"](base)        {"scalerl": ..., "dapo_loss": ..., ...}

leave_one_out    ScaleRL, and what it is with one choice taken back (figure 5, table of section 4)
margin           ScaleRL with three seeds: what a difference between two runs has to be above (A.5)
forward          the baseline before section 3.2, and what it is with one choice made (section 3, figures 3 to 5 and 11)
scaling          ScaleRL with longer thinking, other batches, other group sizes (section 5)
recipes          the five of figure 2
staleness        losses, each at k = 1, k = 8 and phased(16), where tokens are up to 16 updates old
numerics         numerics=fast and bitwise, each on policy, at k = 1, 4 and 8
adapters         all parameters, and adapters of rank 1, 4 and 16, each at a learning rate that suits it
relatives        the base with what is not ablated: other rates, problems, models, warm starts, batches, groups, data

A member is the base with a few fields changed, so it runs wherever the base does: sizes are scaled, not set. `base` is
never changed.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_module

Members = dict[str, Config]
RECIPES = ("scalerl", "deepseek_grpo", "qwen_dapo", "magistral", "minimax_m1")  # in recipes/


def changed(base: Config, **fields: Any) -> Config:
    """A copy; fields by their path, with two underscores for each dot."""
    config = copy.deepcopy(base)
    for path, value in fields.items():
        group, _, name = path.partition("__")
        at = config if not name else getattr(config, group)
        assert hasattr(at, name or group), path
        setattr(at, name or group, value)
    return config


def recipe(base: Config, name: str) -> Config:
    """The base with what makes it one of RECIPES."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recipes", f"{name}.py")
    config: Config = load_module(path, path).change(copy.deepcopy(base))
    return config


def leave_one_out(base: Config) -> Members:
    scalerl = recipe(base, "scalerl")
    return {
        "scalerl": scalerl,
        "prompt_normalization": changed(scalerl, objective__advantage_normalization="prompt"),
        "length_penalty": changed(scalerl, rollout__length_control="penalty"),
        "full_batch": changed(scalerl, objective__filter_zero_variance=False),
        "phased_8": changed(scalerl, pacing__kind="phased"),
        "no_fp32_head": changed(scalerl, model__head_precision="bfloat16"),
        "sample_average": changed(scalerl, objective__aggregation="sample"),
        "uniform_sampling": changed(scalerl, curriculum__no_positive_resampling_at=2.0, curriculum__sampling="uniform"),
        "dapo_loss": changed(scalerl, objective__loss="clip", objective__clip_low=0.2, objective__clip_high=0.26),
    }


def margin(base: Config) -> Members:
    scalerl = recipe(base, "scalerl")
    return {f"seed_{base.seed + n}": changed(scalerl, seed=base.seed + n) for n in range(3)}


def forward(base: Config) -> Members:
    """The baseline: PipelineRL-8, DAPO's clip, sample average, prompt normalization, uniform sampling, no zero-variance
    filter, no FP32 head."""
    baseline = changed(
        recipe(base, "scalerl"),
        objective__loss="clip",
        objective__clip_low=0.2,
        objective__clip_high=0.26,
        objective__aggregation="sample",
        objective__advantage_normalization="prompt",
        objective__filter_zero_variance=False,
        curriculum__no_positive_resampling_at=2.0,
        curriculum__sampling="uniform",
        model__head_precision="bfloat16",
    )
    cispo = changed(baseline, objective__loss="cispo")
    return {
        "baseline": baseline,
        "pipeline_4": changed(baseline, pacing__max_off_policy_steps=4),
        "pipeline_12": changed(baseline, pacing__max_off_policy_steps=12),
        "phased_1": changed(baseline, pacing__kind="phased", pacing__max_off_policy_steps=1),
        "phased_8": changed(baseline, pacing__kind="phased"),
        "cispo_cap_4": changed(cispo, objective__max_ratio=4.0),
        "cispo_cap_5": cispo,
        "cispo_cap_8": changed(cispo, objective__max_ratio=8.0),
        "gspo": changed(baseline, objective__loss="gspo", objective__clip_low=3e-3, objective__clip_high=4e-3),
        "fp32_head": changed(baseline, model__head_precision="default"),
        "prompt_average": changed(baseline, objective__aggregation="prompt"),
        "token_average": changed(baseline, objective__aggregation="token"),
        "batch_normalization": changed(baseline, objective__advantage_normalization="batch"),
        "no_normalization": changed(baseline, objective__advantage_normalization="none"),
        "zero_variance_filter": changed(baseline, objective__filter_zero_variance=True),
        "no_positive_resampling": changed(
            baseline, curriculum__no_positive_resampling_at=0.9, curriculum__sampling="epochs"
        ),
    }


def scaling(base: Config) -> Members:
    """Where the base is the paper's: 32,000 tokens to think, in place of 12,000; 512 and 2,048 completions a step, in
    place of 768; groups of 8, 24 and 32, in place of 16, with as many completions a step."""
    scalerl = recipe(base, "scalerl")
    rollout = scalerl.rollout
    prompts, group = rollout.prompts_per_step, rollout.group_size
    longer = rollout.thinking_budget_max * 5 // 3  # 20,000 more
    rows = -(-longer // 128) * 128 if scalerl.learner.seq_len % 128 == 0 else longer

    def groups(size: int) -> Config:
        most = max(1, prompts * group // size)
        return changed(scalerl, rollout__group_size=size, rollout__prompts_per_step=most)

    return {
        "scalerl": scalerl,
        "long_thinking": changed(
            scalerl,
            rollout__thinking_budget_min=rollout.thinking_budget_min * 8 // 3,
            rollout__thinking_budget_max=rollout.thinking_budget_max + longer,
            learner__seq_len=scalerl.learner.seq_len + rows,
        ),
        "small_batch": changed(scalerl, rollout__prompts_per_step=max(1, prompts * 2 // 3)),
        "large_batch": changed(scalerl, rollout__prompts_per_step=prompts * 8 // 3),
        "half_groups": groups(max(2, group // 2)),
        "half_larger_groups": groups(group * 3 // 2),
        "double_groups": groups(group * 2),
    }


def recipes(base: Config) -> Members:
    return {name: recipe(base, name) for name in RECIPES}


def staleness(base: Config) -> Members:
    scalerl = recipe(base, "scalerl")
    losses = {
        "cispo": scalerl,
        "clip": changed(scalerl, objective__loss="clip", objective__clip_low=0.2, objective__clip_high=0.26),
        "gspo": changed(
            scalerl, objective__loss="gspo", objective__clip_low=3e-3, objective__clip_high=4e-3,
            objective__aggregation="sample",
        ),
        "cispo_dppo": changed(scalerl, objective__dppo_tv_threshold=0.15),
        "cispo_cppo": changed(scalerl, objective__cppo_threshold=0.15),
        "cispo_vcpo": changed(scalerl, optimizer__ess_reference=0.5),
    }  # fmt: skip
    return {
        f"{name}_{how}": changed(config, pacing__kind=kind, pacing__max_off_policy_steps=k)
        for name, config in losses.items()
        for how, kind, k in (("k1", "pipeline", 1), ("k8", "pipeline", 8), ("phased16", "phased", 16))
    }


def numerics(base: Config) -> Members:
    """`k0`: tokens are on policy, as `phased` makes them with one update a batch."""
    scalerl = recipe(base, "scalerl")
    return {
        f"{how}_k{k}": changed(
            scalerl, numerics=how, pacing__kind="pipeline" if k else "phased", pacing__max_off_policy_steps=max(1, k)
        )
        for k in (0, 1, 4, 8)
        for how in ("fast", "bitwise")
    }


def adapters(base: Config) -> Members:
    """Rates are those of a sweep in which the base was the quickstart."""
    rate = base.optimizer.learning_rate
    members = {"all_parameters": changed(base, optimizer__learning_rate=rate * 3)}
    for rank, factor in ((1, 25), (4, 25), (16, 12)):
        members[f"rank_{rank}"] = changed(base, lora__rank=rank, optimizer__learning_rate=rate * factor)
    return members


def relatives(base: Config) -> Members:
    """Where the base is the quickstart: chains of 4 to 8 and of 9 to 13 terms, in place of 6 to 10, and a third more
    tokens for the longer ones; models and warm starts in sizes and shares of slips of their own."""
    rollout, environment, sft = base.rollout, base.environment, base.sft
    rate, prompts, group = base.optimizer.learning_rate, rollout.prompts_per_step, rollout.group_size
    longer, wider = rollout.thinking_budget_min // 3, rollout.max_prompt_tokens // 3
    room = base.learner.seq_len - rollout.max_prompt_tokens - rollout.thinking_budget_max - rollout.answer_budget
    rows = 0 if longer + wider <= room else -(-(longer + wider) // 128) * 128

    def terms(more: int) -> dict[str, int]:
        fewest, most = (max(2, least + more) for least in (environment.minimum_terms, environment.maximum_terms))
        return {"environment__minimum_terms": fewest, "environment__maximum_terms": most}

    def sizes(layers: int, width: int, inside: int) -> Config:
        return changed(base, sft__layers=layers, sft__hidden_size=width, sft__intermediate_size=inside)

    phased = {"objective__loss": "reinforce", "pacing__kind": "phased", "pacing__max_off_policy_steps": 16}
    return {
        "learning_rate_quarter": changed(base, optimizer__learning_rate=rate / 4),
        "learning_rate_4x": changed(base, optimizer__learning_rate=rate * 4),
        "learning_rate_12x": changed(base, optimizer__learning_rate=rate * 12),
        "learning_rate_40x": changed(base, optimizer__learning_rate=rate * 40),
        "easier": changed(base, **terms(-2)),
        "harder": changed(
            base,
            **terms(3),
            rollout__max_prompt_tokens=rollout.max_prompt_tokens + wider,
            rollout__thinking_budget_min=rollout.thinking_budget_min + longer,
            rollout__thinking_budget_max=rollout.thinking_budget_max + longer,
            learner__seq_len=base.learner.seq_len + rows,
        ),
        "small_model": sizes(2, 64, 160),
        "large_model": sizes(4, 128, 320),
        "slips_2x": changed(base, sft__error_rate=min(0.4, sft.error_rate * 2)),
        "slips_half": changed(base, sft__error_rate=sft.error_rate / 2),
        "small_batch": changed(base, rollout__prompts_per_step=max(1, prompts // 2)),
        "large_batch": changed(
            base, rollout__prompts_per_step=prompts * 2, learner__micro_batch_rows=base.learner.micro_batch_rows * 2
        ),
        "small_groups": changed(base, rollout__group_size=max(2, group // 2), rollout__prompts_per_step=prompts * 2),
        "large_groups": changed(base, rollout__group_size=group * 2, rollout__prompts_per_step=max(1, prompts // 2)),
        "few_prompts": changed(base, environment__train_prompts=max(1, environment.train_prompts // 8)),
        "reinforce_phased16": changed(base, **phased, objective__advantage_normalization="none"),
        "reinforce_12x": changed(base, **phased, optimizer__learning_rate=rate * 12),
    }


STUDIES: dict[str, Callable[[Config], Members]] = {
    "leave_one_out": leave_one_out,
    "margin": margin,
    "forward": forward,
    "scaling": scaling,
    "recipes": recipes,
    "staleness": staleness,
    "numerics": numerics,
    "adapters": adapters,
    "relatives": relatives,
}
