"""A run that learns nothing says so, why, and when it goes on: in the words of the console and of the page alike."""

import pytest

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.report.health import health
from scalerl_jax.run import alarms

SETTINGS = config_check.leaves(Config())


def row(step, *, surviving=0.0, right=0.0, truncated=0.0, unended=0.0, **changes):
    """A row of metrics.jsonl as the trainer writes it; one without surviving prompts has no gradient_norm."""
    found = {
        "step": step, "prompts": 4.0, "prompts_surviving": surviving, "pass_rate": right, "truncated": truncated,
        "no_end_of_thinking": unended,
    }  # fmt: skip
    return found | ({"gradient_norm": 0.1, "entropy": 0.5} if surviving else {}) | changes


def said(rows):
    watch = alarms.LearningWatch(SETTINGS)
    return [text for text in (watch.row(one) for one in rows) if text]


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (
            {},
            "all completions are wrong: 5 updates without a gradient (1 to 5; 0% of the completions right, 100% wrong",
        ),
        ({"right": 1.0}, "all completions are right: 5 updates"),
        ({"truncated": 0.9}, "90% of the completions are truncated: 5 updates"),
        ({"unended": 0.8}, "no end of thinking in 80% of the completions, so they have no answer: 5 updates"),
        # Cut in the middle of the thinking: that it did not end is what the cut did.
        ({"truncated": 0.9, "unended": 0.6}, "90% of the completions are truncated: "),
        ({"right": 0.5}, "of every prompt the completions are all right or all wrong: "),
    ],
)
def test_the_console_says_why_and_the_page_says_the_same(shares, why):
    rows = [row(step, **shares) for step in range(1, 6)]
    (line,) = said(rows)
    assert line.startswith("update 5: nothing is learned, ") and why in line and "What to do: " in line
    assert "\n" not in line
    (alarm,) = health(rows, SETTINGS)["alarms"]
    assert alarm["chart"] == "surviving" and alarm["says"] in line and alarm["advice"] in line


def test_once_an_episode_and_again_when_it_is_over():
    rows = [row(1, surviving=3.0), *(row(n) for n in range(2, 9)), row(9, surviving=1.0, right=0.1)]
    rows += [row(n) for n in range(10, 14)]  # four on end are no episode
    rows += [row(14, surviving=1.0), *(row(n, right=1.0) for n in range(15, 20))]
    lines = said(rows)
    assert [line.partition(":")[0] for line in lines] == ["update 6", "update 9", "update 19"]
    assert "all completions are wrong: 5 updates" in lines[0] and "(2 to 6;" in lines[0]
    assert lines[1] == "update 9: learning again, after 7 updates without a gradient"
    assert "all completions are right" in lines[2]


def test_a_gradient_of_exactly_0_is_none():
    rows = [row(n, surviving=2.0, right=0.5, gradient_norm=0.0) for n in range(1, 6)]
    assert len(said(rows)) == 1
    assert said([row(n, surviving=2.0, right=0.5, gradient_norm=None) for n in range(1, 6)]) == []


def test_limits_become_alarms_with_a_figure_and_an_advice():
    rows = [row(n, surviving=4.0, right=0.5, truncated=0.12, clipped=0.0) for n in range(1, 15)]
    (alarm,) = alarms.alarms(rows, SETTINGS)
    assert alarm.chart == "truncated"
    assert str(alarm).startswith("12% of the completions are cut by the token budget (mean of the last 10 updates;")
    assert "the limit is 10%" in str(alarm) and "config.rollout.answer_budget" in alarm.advice
    assert alarms.alarms(rows[:0], SETTINGS) == []
    # A warm start's rows tell of no prompts, and raise nothing.
    assert alarms.alarms([{"step": 20 * n, "loss": 1.0, "gradient_norm": 0.5} for n in range(9)], SETTINGS) == []
