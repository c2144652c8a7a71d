"""Stopping and going back: what is written down, and a going back that is cut short anywhere."""

import json
import os

import pytest

from scalerl_jax.cli.entry import UserError
from scalerl_jax.run import collapse_record, going_back
from scalerl_jax.run.collapse import Collapse
from scalerl_jax.run.collapse_record import Entry, read
from scalerl_jax.run.going_back import Collapsed, carry_out, leave

FOUND = Collapse(step=49, since=41, last_good=43, signs=("it fell",))


class Killed(BaseException):
    pass


def run_of(folder) -> str:
    """A run folder at step 49."""
    for step in (30, 40, 45):
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "state").write_text(f"of {step}")
    (folder / "rollouts").mkdir()
    for step in (30, 40, 41, 49):
        (folder / "rollouts" / f"step-{step:08d}.jsonl").write_text(f"{step}\n")
    rows = [{"step": step, "compute": {"device_hours": step / 4}} for step in range(1, 50)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evals.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(0, 50, 5)))
    return str(folder)


def tree(folder) -> dict[str, str]:
    return {os.path.relpath(path, folder): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_it_goes_back_to_the_newest_checkpoint_of_before_and_sets_the_rest_aside(tmp_path):
    workdir = run_of(tmp_path)
    assert carry_out(workdir, on_collapse="rollback") == ""  # nothing has happened
    end = leave(workdir, FOUND, on_collapse="rollback")
    assert end.again and end.code == 3 and read(workdir)[0].then == "going back"
    said = carry_out(workdir, on_collapse="rollback")
    assert said == (
        "went back from step 49 to step 40: the policy has collapsed since update 41: it fell; updates 41 to 49 "
        "(2.25 device-hours, which stay booked) are set aside in collapsed/"
    )
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["30", "40", "collapsed-45-0"]
    assert (tmp_path / "checkpoints/collapsed-45-0/state").read_text() == "of 45"
    assert steps(tmp_path / "collapsed/metrics.jsonl") == [*range(41, 50)]
    assert steps(tmp_path / "collapsed/evals.jsonl") == [45]
    assert sorted(os.listdir(tmp_path / "collapsed/rollouts")) == ["step-00000041.jsonl", "step-00000049.jsonl"]
    assert carry_out(workdir, on_collapse="rollback") == carry_out(workdir, on_collapse="stop") == ""


def test_cut_short_anywhere_the_next_start_carries_it_out(tmp_path, monkeypatch):
    """Every write and every rename is, once, the last thing that is done; once it is not even done."""
    whole = tmp_path / "whole"
    whole.mkdir()
    leave(run_of(whole), FOUND, on_collapse="rollback")
    said = carry_out(str(whole), on_collapse="rollback")
    acts, cuts = 0, 0
    while True:
        cut = tmp_path / f"cut-{cuts}"
        cut.mkdir()
        leave(run_of(cut), FOUND, on_collapse="rollback")
        with monkeypatch.context() as patched:
            left = cuts

            def limited(act, left_of=None):
                def does(*arguments, **options):
                    nonlocal left, acts
                    if left == 0:
                        raise Killed
                    left, acts = left - 1, acts + 1
                    done = act(*arguments, **options)
                    if left == 0:
                        raise Killed
                    return done

                return does

            for writes in (collapse_record, going_back):
                patched.setattr(writes, "write_whole", limited(writes.write_whole))
            patched.setattr(os, "rename", limited(os.rename))
            try:
                carry_out(str(cut), on_collapse="rollback")
            except Killed:
                pass
            else:
                break
        # Whatever is asked for by then: what has begun is carried out.
        assert carry_out(str(cut), on_collapse=("alarm", "stop", "rollback")[cuts % 3]) in (said, "")
        assert tree(cut) == tree(whole), cuts
        cuts += 1
    assert cuts == 8 and acts > 20  # two records, two logs, two samples, one checkpoint


def test_a_run_that_has_stopped_goes_on_only_where_it_is_asked_to(tmp_path):
    workdir = run_of(tmp_path)
    end = leave(workdir, FOUND, on_collapse="stop")
    how = (
        "stopped at step 49: the policy has collapsed since update 41: it fell; the last good checkpoint is that of "
        "step 40; --config.checkpoint.on_collapse=rollback goes back to it; --config.checkpoint.on_collapse=alarm goes "
        "on from step 45"
    )
    assert not end.again and str(end) == how
    before = tree(tmp_path)
    with pytest.raises(Collapsed) as again:
        carry_out(workdir, on_collapse="stop")
    assert str(again.value) == how and again.value.code == 3 and tree(tmp_path) == before
    said = carry_out(workdir, on_collapse="alarm")
    assert said.startswith("going on from step 45 as --config.checkpoint.on_collapse=alarm asks: the policy has coll")
    assert carry_out(workdir, on_collapse="stop") == ""  # it has gone on


def test_a_run_that_has_stopped_may_go_back_instead(tmp_path):
    workdir = run_of(tmp_path)
    leave(workdir, FOUND, on_collapse="stop")
    assert carry_out(workdir, on_collapse="rollback").startswith("went back from step 49 to step 40: ")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["30", "40", "collapsed-45-0"]


def test_it_goes_back_once(tmp_path):
    workdir = run_of(tmp_path)
    leave(workdir, FOUND, on_collapse="rollback")
    carry_out(workdir, on_collapse="rollback")
    end = leave(workdir, FOUND, on_collapse="rollback")
    assert not end.again and "the run has gone back once, and goes back no more" in str(end)
    with pytest.raises(Collapsed, match="goes back no more"):
        carry_out(workdir, on_collapse="rollback")
    assert [entry.then for entry in read(workdir)] == ["went back", "stopped"]


def test_without_a_checkpoint_of_before_it_begins_again(tmp_path):
    workdir = run_of(tmp_path)
    early = Collapse(step=49, since=21, last_good=20, signs=("it fell",))
    assert "no checkpoint of before is kept" in str(leave(workdir, early, on_collapse="stop"))
    assert carry_out(workdir, on_collapse="rollback").startswith("went back from step 49 to step 0: ")
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.isdigit()]
    assert steps(tmp_path / "collapsed/evals.jsonl") == [*range(5, 50, 5)]  # that of the policy it begins with stays


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"collapses": [{"step": 1}]}', '{"collapses": [4]}'])
def test_a_damaged_record_is_one_line(tmp_path, text):
    (tmp_path / collapse_record.FILE).write_text(text)
    if text == "{}":  # of none
        assert carry_out(str(tmp_path), on_collapse="alarm") == ""
        return
    with pytest.raises(UserError, match=r"collapse\.json: is not? ") as error:
        carry_out(str(tmp_path), on_collapse="alarm")
    assert "\n" not in str(error.value)


def test_the_record_is_read_as_it_was_written(tmp_path):
    workdir = run_of(tmp_path)
    leave(workdir, FOUND, on_collapse="stop")
    assert read(workdir) == [Entry(49, 41, 43, str(FOUND), "stopped")]
