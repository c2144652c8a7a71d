"""A run that learns nothing says so, why, and when it goes on: in the words of the console and of the page alike.

The console names a limit once when it is passed and once when that is over, an alarm now and then in between.
"""

import pytest

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.report.health import health
from scalerl_jax.rollouts.parity import LIMITS, LIMITS_WITH_EXPERTS
from scalerl_jax.run import alarms
from scalerl_jax.run.alarms import RECENT, REMIND, LearningWatch

SETTINGS = config_check.leaves(Config())


def row(step, *, surviving=0.0, right=0.0, truncated=0.0, unended=0.0, **changes):
    """A row of metrics.jsonl as the trainer writes it; one without surviving prompts has no gradient_norm."""
    found = {
        "step": step, "prompts": 4.0, "prompts_surviving": surviving, "pass_rate": right, "truncated": truncated,
        "no_end_of_thinking": unended,
    }  # fmt: skip
    return found | ({"gradient_norm": 0.1, "entropy": 0.5} if surviving else {}) | changes


def said(rows):
    watch = LearningWatch(SETTINGS)
    return [line for one in rows for line in watch.row(one)]


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
        ({"score/ended/failed": 0.9}, "90% of the episodes failed, so nothing is learned of them: "),
        (
            {"score/ended/failed": 0.2},
            "all completions are wrong: 5 updates without a gradient (1 to 5; 0% of the "
            "completions right, 100% wrong, 0% truncated, 20% of the episodes failed)",
        ),
    ],
)
def test_the_console_says_why_and_the_page_says_the_same(shares, why):
    rows = [row(step, **shares) for step in range(1, 6)]
    (line,) = said(rows)
    assert line.startswith("update 5: nothing is learned, ") and why in line and "What to do: " in line
    assert "\n" not in line
    (alarm,) = health(rows, SETTINGS)["alarms"]
    assert alarm["chart"] == "surviving" and alarm["message"] in line and alarm["advice"] in line


def test_once_an_episode_and_again_when_it_is_over():
    rows = [row(1, surviving=3.0), *(row(n) for n in range(2, 9)), row(9, surviving=1.0, right=0.1)]
    rows += [row(n) for n in range(10, 14)]  # four on end are no episode
    rows += [row(14, surviving=1.0), *(row(n, right=1.0) for n in range(15, 20))]
    lines = said(rows)
    # Beside the two episodes: ten updates with next to no surviving prompt are a warning of their own.
    assert "warning: only 0.4 prompts of a batch have both" in lines.pop(2)
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


def test_a_student_may_become_as_sure_as_its_teacher():
    rows = [sound(1, entropy=0.5), *(sound(n, entropy=0.01) for n in range(2, 15))]
    assert [alarm.chart for alarm in alarms.alarms(rows, SETTINGS)] == ["entropy"]
    assert alarms.alarms(rows, {**SETTINGS, "objective.reward_weight": 0.0}) == []


# ---- one sign gone wrong, and no other ----------------------------------------------------------------------------

SOUND = {
    "truncated": 0.02, "interrupted": 0.03, "repetitive": 0.0, "repetition": 0.1, "clipped": 0.001, "mismatch": 0.004,
    "mismatch_p99": 0.06, "mismatch_max": 2.0, "kl": 2e-4, "effective_sample_size": 0.995,
    "effective_sample_size_sequence": 0.02, "effective_sample_size_geometric": 0.999, "lag_mean": 7.0, "lag_max": 8.0,
}  # fmt: skip


def sound(step, **changes):
    return row(step, surviving=3.0, right=0.5, **(SOUND | {"entropy": max(0.3, 0.5 - 0.01 * step)} | changes))


# (column, value within its limits, value past them, what is said, an alarm)
GONE_WRONG = [
    ("truncated", 0.049, 0.06, "6% of the completions are cut by the token budget", False),
    ("truncated", 0.099, 0.101, "10.1% of the completions are cut by the token budget", True),
    ("interrupted", 0.049, 0.07, "7% of the completions have their thinking cut short", False),
    ("interrupted", 0.099, 0.15, "15% of the completions have their thinking cut short", True),
    ("repetitive", 0.049, 0.08, "8% of the completions end in a loop", False),
    ("repetitive", 0.099, 0.5, "50% of the completions end in a loop", True),
    ("score/ended/failed", 0.049, 0.06, "6% of the episodes failed", False),
    ("score/ended/failed", 0.099, 0.3, "30% of the episodes failed", True),
    ("clipped", 0.009, 0.02, "2% of the tokens are at the cap", False),
    ("mismatch", 0.19, 0.21, "the trainer's log-probs differ from the generators' by 0.21 on average", False),
    ("mismatch_p99", 0.69, 0.7, "one token in a hundred differs by more than 0.7 nats", False),
    ("kl", 0.09, 0.2, "generators and trainer are 0.2 nats apart", False),
    ("effective_sample_size", 0.91, 0.8, "the tokens of a batch count for 80% of their number", False),
    ("effective_sample_size_geometric", 0.91, 0.5, "the completions of a batch count for 50% of their number", False),
    ("entropy", 0.06, 0.04, "the entropy is down to 0.04 nats", False),
    ("prompts_surviving", 1.0, 0.9, "only 0.9 prompts of a batch have both right and wrong completions", False),
]


@pytest.mark.parametrize(("column", "within", "past", "says", "loud"), GONE_WRONG)
def test_each_sign_that_goes_wrong_raises_its_own_alarm(column, within, past, says, loud):
    before = [sound(step) for step in range(1, 11)]
    assert alarms.alarms(before, SETTINGS) == [] and said(before) == []
    gone = [sound(step, **{column: past}) for step in range(11, 31)]
    (alarm,) = alarms.alarms(before + gone, SETTINGS)
    key = next(key for key, sign in alarms.SIGNS.items() if sign.column == column)
    assert (alarm.chart, alarm.loud) == (key, loud)
    assert alarm.message.startswith(says) and "the limit is" in alarm.message
    assert alarm.advice == alarms.SIGNS[key].advice and "\n" not in str(alarm)
    *_, last = said(before + gone)  # a mean that climbs may pass the warning's limit first
    assert (": ALARM: " if loud else ": warning: ") in last and last.endswith(f"What to do: {alarm.advice}.")
    still = alarms.alarms([*before, *(sound(step, **{column: within}) for step in range(11, 31))], SETTINGS)
    assert [one for one in still if one.loud == loud] == []


def test_every_sign_with_a_limit_is_gone_through():
    assert {column for column, *_ in GONE_WRONG} == {sign.column for sign in alarms.SIGNS.values()}
    drawn = alarms.limits([sound(1)], SETTINGS)
    assert drawn.keys() - {"lag"} == alarms.SIGNS.keys()


@pytest.mark.parametrize(
    ("trainer", "generators", "changes", "limit"),
    [
        ("float32", "float32", {}, 0.01),
        ("float32", "bfloat16", {}, 0.2),
        ("bfloat16", "float32", {}, 0.2),
        ("auto", "auto", {}, 0.2),
        ("bfloat16", "bfloat16", {"expert_load": 1.2}, 0.6),
        ("float32", "float32", {"expert_load": 1.2}, 0.01),
    ],
)
def test_the_limit_of_the_mismatch_is_that_of_joining_servers(trainer, generators, changes, limit):
    settings = SETTINGS | {"model.compute_dtype": trainer, "fleet.compute_dtype": generators}
    (drawn,) = alarms.limits([sound(1, **changes)], settings)["mismatch"]
    assert drawn.value == limit
    if trainer != "auto":
        coarser = "bfloat16" if "bfloat16" in (trainer, generators) else "float32"
        assert limit == (LIMITS_WITH_EXPERTS if changes else LIMITS)[coarser][1]


def test_the_page_judges_no_sooner_than_the_console():
    rows = [sound(step, truncated=0.5) for step in range(1, RECENT + 1)]
    for count in (1, RECENT - 1):
        page = health(rows[:count], SETTINGS)
        assert page["alarms"] == [] == said(rows[:count])
        assert not any(line["over"] for chart in page["charts"] for line in chart["lines"])
    page = health(rows, SETTINGS)
    assert [alarm["chart"] for alarm in page["alarms"]] == ["truncated"] and len(said(rows)) == 1
    assert [chart["key"] for chart in page["charts"] if any(line["over"] for line in chart["lines"])] == ["truncated"]


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_what_other_losses_clip_has_no_limit(loss):
    rows = [sound(step, clipped=0.2) for step in range(1, 21)]
    settings = SETTINGS | {"objective.loss": loss}
    assert [alarm.chart for alarm in alarms.alarms(rows, SETTINGS)] == ["clipped"]
    assert alarms.alarms(rows, settings) == []
    of_loss, of_cispo = (
        next(chart for chart in health(rows, values)["charts"] if chart["key"] == "clipped")
        for values in (settings, SETTINGS)
    )
    assert of_loss["lines"] == [] and of_cispo["lines"] and of_loss["series"] == of_cispo["series"]
    assert "no limit" in of_loss["means"] and "cap" not in of_loss["what"] and "cap" in of_cispo["what"]


def test_an_alarm_stands_before_the_warnings():
    rows = [sound(step, truncated=0.07, repetitive=0.3, clipped=0.1) for step in range(1, 12)]
    found = [(alarm.chart, alarm.loud) for alarm in alarms.alarms(rows, SETTINGS)]
    assert found == [("repetitive", True), ("truncated", False), ("clipped", False)]


def test_a_run_of_before_has_no_word_on_what_it_did_not_record():
    rows = [{name: value for name, value in sound(n).items() if name in ("step", "truncated")} for n in range(1, 20)]
    assert alarms.alarms(rows, SETTINGS) == [] and said(rows) == []


# ---- the lines of the console over time ----------------------------------------------------------------------------


def numbered(lines):
    """(update, word, the line) of each."""
    return [(int(line.split(":")[0].split()[1]), line.split(":")[1].strip(), line) for line in lines]


def test_a_warning_once_when_it_begins_and_once_when_it_is_over():
    rows = [sound(n) for n in range(1, 21)]
    rows += [sound(n, truncated=0.08) for n in range(21, 121)]
    rows += [sound(n) for n in range(121, 161)]
    (begins, ends) = numbered(said(rows))
    # 0.02 and 0.08 in turn of ten: past 5 % with six of them.
    assert begins[:2] == (26, "warning") and ": 5.6% of the completions are cut by the token budget" in begins[2]
    assert "What to do: raise config.rollout.answer_budget" in begins[2]
    # Within from the sixth sound one on, and said when ten on end were.
    assert ends[:2] == (134, "truncation is within its limits again (0.02 in the mean), after 99 updates past them")


def test_a_warning_that_becomes_an_alarm_is_repeated_now_and_then():
    rows = [sound(n) for n in range(1, 11)] + [sound(n, repetitive=0.01 * (n - 10)) for n in range(11, 31)]
    rows += [sound(n, repetitive=0.4) for n in range(31, 31 + 3 * REMIND)]
    lines = numbered(said(rows))
    assert [word for _, word, _ in lines] == ["warning", "ALARM", "ALARM", "ALARM", "ALARM"]
    at = [update for update, _, _ in lines]
    assert at[0] < at[1] and [later - at[1] for later in at[2:]] == [REMIND, 2 * REMIND, 3 * REMIND]


def test_a_single_update_past_a_limit():
    """Two bad updates ten apart: only at the second are both of them among the last ten."""
    begins, ends = numbered(said([sound(n, interrupted={5: 0.21, 14: 0.21}.get(n, 0.0125)) for n in range(1, 40)]))
    assert begins[0] == 14 and "5.2% of the completions have their thinking cut short" in begins[2]
    assert ends[0] == 24 and ends[1].endswith("after 1 update past them")


def test_what_swings_about_its_limit_is_one_episode():
    rows = [sound(n, interrupted=0.045 + 0.02 * (n // RECENT % 2)) for n in range(1, 201)]
    assert [word for _, word, _ in numbered(said(rows))] == ["warning"]


def test_the_first_updates_are_too_few_to_judge():
    """One long completion of the first eight is no trend; what the page says of it is marked by its mean."""
    assert said([sound(n, truncated=0.5) for n in range(1, RECENT)]) == []
    assert len(said([sound(n, truncated=0.5) for n in range(1, RECENT + 1)])) == 1


def test_updates_without_a_gradient_end_no_episode():
    """They record no ratio: that it is well again is not known."""
    rows = [sound(n, kl=0.5) for n in range(1, 15)]
    rows += [row(n, right=1.0, interrupted=0.0, repetitive=0.0, truncated=0.0) for n in range(15, 60)]
    lines = [line for line in said(rows) if "KL" in line]
    assert len(lines) == 1 and "warning: generators and trainer are 0.5 nats apart" in lines[0]
    # Of truncation and of the effective batch "nothing is learned" has said more.
    cut = [row(n, truncated=1.0) for n in range(1, 40)]
    assert [line for line in said(cut) if "nothing is learned" not in line] == []


@pytest.mark.parametrize("kept", [1, 4, 40])
def test_a_run_that_goes_on_hears_at_once_of_what_stands(kept):
    earlier = [sound(n, entropy=0.5, truncated=0.3) for n in range(1, kept + 1)]
    watch = LearningWatch(SETTINGS, earlier)
    lines = [line for n in range(kept + 1, kept + 21) for line in watch.row(sound(n, truncated=0.3, entropy=0.01))]
    first, *others = numbered(lines)
    assert first[:2] == (max(kept + 1, RECENT), "ALARM") and "are cut by the token budget" in first[2]
    # The first entropy is that of the run, and not of its restart.
    assert [word for _, word, _ in others] == ["warning"] and "the entropy is down to" in others[0][2]


def test_rows_of_before_that_somebody_edited():
    earlier = [sound(n, entropy="high", kl=None, truncated=[0.5], prompts={}) for n in range(1, 12)]
    assert LearningWatch(SETTINGS, earlier).row(sound(12)) == []


def test_what_is_kept_is_bounded():
    watch = LearningWatch(SETTINGS)
    for n in range(1, 300):
        watch.row(sound(n, lags={str(lag): 1 for lag in range(100)}, compute={"device_hours": 1.0}))
    assert len(watch._recent) == RECENT and "lags" not in watch._recent[0]
