"""What the console hears of limits: once when one is passed, once when it is over, alarms now and then in between."""

import pytest

from scalerl_jax.run.alarms import RECENT
from scalerl_jax.run.learning_watch import REMIND, LearningWatch
from tests.run.test_alarms import SETTINGS, row, said, sound


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
