"""The report's data and its file, without a browser: what is in it, what is left out, what can go wrong."""

import base64
import hashlib
import json
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.cli.entry import UserError
from scalerl_jax.report import samples, time_line
from scalerl_jax.report.command import report
from scalerl_jax.report.log_rows import groups_of, thinned
from scalerl_jax.report.page import as_json, read_run, read_settings, render, write_report
from tests.report import run_folders
from tests.report.run_folders import embedded
from tests.support.paths import ROOT
from tests.support.processes import run_command

ASSETS = ROOT / "scalerl_jax" / "report" / "assets"
LOGS = ("metrics.jsonl", "evals.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "a run"
    hostile = run_folders.sample(
        5, 50, run_folders.HOSTILE, prompt=run_folders.HOSTILE, answer=run_folders.HOSTILE, task=run_folders.HOSTILE
    )
    return run_folders.write_run(folder, samples=[hostile])


@pytest.fixture(scope="module")
def data(run) -> dict:
    return read_run(run)


@pytest.mark.slow
def test_a_collapse_is_the_first_alarm(tmp_path):
    folder = run_folders.write_run(tmp_path / "fallen")
    assert not [alarm for alarm in read_run(folder)["health"]["alarms"] if "collapsed" in alarm["message"]]
    path = pathlib.Path(folder) / "evals.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"pass_rate_low": row["pass_rate"] - 0.02, "pass_rate_high": row["pass_rate"] + 0.02}
    for row in rows[-2:]:
        row |= {"passes": [0] * len(row["passes"]), "pass_rate": 0.0, "pass_rate_low": 0.0, "pass_rate_high": 0.01}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *_ = read_run(folder)["health"]["alarms"]
    assert first["message"].startswith("the policy has collapsed since update 2") and first["loud"]
    assert (
        "held-out pass rate 0.000 at step 30" in first["message"]
        and "go back to the checkpoint of update" in first["advice"]
    )
    assert first["message"] in html_of(folder)


def html_of(folder: str) -> str:
    with open(write_report([folder])) as file:
        return file.read()


# ---- what the page says of a run -----------------------------------------------------------------------------------


def test_the_evaluations_and_the_forecast(data):
    rows = data["score"]["evaluations"]
    assert rows["step"] == list(range(0, 31, 2))
    assert rows["pass_rate"][-1] == pytest.approx(
        run_folders.rate(0.3), abs=1 / run_folders.PROMPTS / run_folders.SAMPLES
    )
    assert rows["device_hours"] == pytest.approx([0.02 * i for i in range(16)])
    for axis in ("typical_hours", "device_hours"):
        curve = data["score"]["curves"][axis]["all"]
        assert curve["asymptote"] == pytest.approx(0.9, abs=0.02) and curve["fits"]
        assert curve["midpoint"] == pytest.approx(0.2, rel=0.08)
        assert curve["x"][0] == 0 and curve["x"][-1] == pytest.approx(0.6) and np.all(np.diff(curve["x"]) > 0)
        drawn = [run_folders.rate(x) for x in curve["x"]]
        assert curve["y"] == pytest.approx(drawn, abs=0.02)
        assert np.all(np.array(curve["low"]) <= curve["y"]) and np.all(np.array(curve["y"]) <= curve["high"])
    half = data["score"]["curves"]["typical_hours"]["half"]
    assert half["until"] == pytest.approx(0.14)
    last = np.mean([run_folders.rate(0.01 * step) for step in range(24, 31, 2)])
    assert half["measured"] == pytest.approx(last, abs=0.002)
    assert half["error"] == pytest.approx(half["forecast"][0] - half["measured"], abs=1e-4)
    assert {task["name"]: task["prompts"] for task in data["score"]["tasks"]} == run_folders.TASKS


def test_the_alarms(data):
    charts = {chart["key"]: chart for chart in data["health"]["charts"]}
    over = {key: [line["label"] for line in chart["lines"] if line["over"]] for key, chart in charts.items()}
    assert {key: labels for key, labels in over.items() if labels} == {"truncated": ["5%", "10%"]}
    assert charts["truncated"]["latest"] == pytest.approx(0.12)
    assert [line["label"] for line in charts["lag"]["lines"]] == ["k = 8"]
    # Updates without a gradient have no entropy: a gap, not a 0.
    entropy = charts["entropy"]["series"][0]["mean"]
    assert entropy[9] is entropy[19] is entropy[29] is None and min(v for v in entropy if v is not None) > 0


def test_the_time_line_and_the_hours(data):
    time = data["time"]
    assert [one["step"] for one in time["intervals"]] == list(range(1, 31))
    assert all(one["pause"] is None for one in time["intervals"])
    for one in time["intervals"]:
        assert sum(one["trainer"]) == pytest.approx(1) and sum(one["generators"]) == pytest.approx(1)
    update, waiting, evaluation, _, other, stalled = time["intervals"][10]["trainer"]
    whole = 0.005 + 0.003 + 0.002  # device-hours of an update's interval, by run_folders.compute
    assert (update, evaluation, stalled) == pytest.approx((0.004 / whole, 0.003 / whole, 0.002 / whole), rel=1e-3)
    assert waiting + other == pytest.approx(0.001 / whole, rel=1e-3)
    assert time["names"] == [["127.0.0.1:4001", pytest.approx(4.5)], ["verifier", pytest.approx(1.5)]]
    hours = data["totals"]["hours"]
    expected = {"busy": 0.12, "idle": 0.03, "evaluation": 0.09, "setup": 0.02, "stalled": 0.06}
    assert hours["trainer"] == pytest.approx(expected)
    assert data["totals"]["device_hours"] == pytest.approx(0.3)


def test_a_pause_between_two_starts_is_no_time_of_the_run():
    rows = [
        {
            "step": step,
            "time": when,
            "incarnation": incarnation,
            "waited_seconds": 1,
            "update_seconds": 2,
            "compute": {},
        }
        for step, when, incarnation in ((1, 10.0, 1), (2, 14.0, 1), (3, 1000.0, 2), (4, 1004.0, 2))
    ]
    drawn = time_line.time_line(rows, [])["intervals"]
    assert [(one["start"], one["end"], one["pause"]) for one in drawn] == [
        (0, 3, None),
        (3, 7, None),
        (7, 10, 983),  # the new trainer's first update began at 997, the last of the old one ended at 14
        (10, 14, None),
    ]
    assert time_line.running_seconds(rows) == 4 + 4
    rows[2]["time"], rows[3]["time"] = 12.0, 16.0  # by a clock that is behind
    drawn = time_line.time_line(rows, [])["intervals"]
    assert [(one["start"], one["end"]) for one in drawn] == [(0, 3), (3, 7), (7, 10), (10, 14)]


def test_a_clock_that_is_set_back_in_mid_run_takes_no_time_back():
    rows = [
        {"step": step, "time": when, "incarnation": 1, "waited_seconds": 1, "update_seconds": 2, "compute": {}}
        for step, when in ((1, 1010.0), (2, 1014.0), (3, 10.0), (4, 14.0))
    ]
    drawn = time_line.time_line(rows, [])["intervals"]
    assert [(one["start"], one["end"]) for one in drawn] == [(0, 3), (3, 7), (7, 7), (7, 11)]
    assert time_line.running_seconds(rows) == 4 + 4


def test_an_evaluation_beside_training_is_neither_later_nor_counted_twice(tmp_path):
    folder = pathlib.Path(run_folders.write_run(tmp_path / "beside"))
    rows = {name: [json.loads(line) for line in (folder / name).read_text().splitlines()] for name in LOGS}
    *_, last = rows["metrics.jsonl"]
    for row in rows["evals.jsonl"]:
        row["time"] += 7  # the last one, of step 28, is written after the last update
    del rows["evals.jsonl"][-1]
    rows["evals.jsonl"][-1]["time"] = last["time"] + 5
    for name, found in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    page = read_run(str(folder))
    assert page["totals"]["device_hours"] == pytest.approx(last["compute"]["device_hours"])
    first = min(rows[name][0]["time"] for name in LOGS)
    assert page["seconds"] <= last["time"] + 5 - first


def test_forecasts_have_one_form_and_one_level(data):
    curves = data["score"]["curves"]
    assert list(curves) == ["typical_hours", "device_hours"]
    assert {curve["level"] for axis in curves.values() for curve in axis.values()} == {0.9}
    form = r"forecast at {} \({}\): 0\.\d{{3}} at {} \(90 %: 0\.\d{{3}} to 0\.\d{{3}}\); {}"
    measured, cost = (
        r"measured 0\.\d{3}; \d of 8 later evaluations within",
        "up to there about 0.6 device-hours at this",
    )
    for axis, name, until, after in (
        ("typical_hours", "typical device-hours", "0.3", cost),
        ("device_hours", "device-hours", "0.3", "A"),
    ):
        half, whole = (curves[axis][part]["sentence"] for part in ("half", "all"))
        assert re.fullmatch(form.format("half of the compute", name, "the end", measured), half)
        assert re.match(form.format(until, name, "twice the compute", after), whole)


def test_a_flat_run_has_words_in_the_place_of_a_curve(tmp_path):
    run = read_run(run_folders.write_run(tmp_path / "flat", final=0.3))
    for curves in run["score"]["curves"].values():
        assert curves["all"].keys() == {"why"} and curves["all"]["why"].startswith("flat: the reward stays near 0.300")


def test_an_alarm_says_what_to_do(data):
    (alarm,) = data["health"]["alarms"]
    assert alarm["chart"] == "truncated" and alarm["message"].startswith("12% of the completions are cut by the token")
    assert "config.rollout.answer_budget" in alarm["advice"]


def test_a_warm_start_shows_its_loss(tmp_path):
    run = read_run(run_folders.write_warm_start(tmp_path / "warm"))
    assert (run["kind"], run["updates"], run["planned"]) == ("warm start", 60, 60)
    charts = {chart["key"]: chart for chart in run["health"]["charts"]}
    assert charts.keys() == {"loss", "gradient"}
    series = {series["name"]: series["mean"] for series in charts["loss"]["series"]}
    assert series == {"trained on": [None, 3.0, 2.0, 1.5, 1.0], "held out": [6.0, None, 2.5, None, 1.25]}
    assert run["health"]["step"] == [0, 20, 30, 40, 60]
    assert run["health"]["alarms"] == [] and run["time"] == {"intervals": []}
    assert embedded(render({"written": 0.0, "runs": [run]}))["runs"][0]["kind"] == "warm start"


def test_where_things_lie_is_not_told(run, data):
    assert str(pathlib.Path(run).parent) not in json.dumps(data)
    assert ["telemetry.samples_every", "5"] in data["config"]


def test_files_and_addresses_of_any_field_are_not_told(tmp_path):
    folder = run_folders.write_run(tmp_path / "run", updates=8)
    path = pathlib.Path(folder, "config.json")
    config = json.loads(path.read_text())
    config["fleet"] |= {"tls_authority": "/secret/a.pem", "tls_name": "secret.example", "vllm_python": "/secret/python"}
    config["environment"] |= {"name": "/secret/env.py:Env", "rewards": {"secret.py:score": 1.0, "environment": 0.5}}
    config["environment"]["judge"] |= {"url": "http://secret:8000/v1", "model": "told"}
    path.write_text(json.dumps(config))
    told = read_run(folder)["config"]
    assert "secret" not in json.dumps(told)
    assert ["environment.judge.model", '"told"'] in told


# ---- completions, to the character ---------------------------------------------------------------------------------


def completion_of(drawn: dict) -> str:
    return "".join(drawn["text"])


@settings(max_examples=200)
@given(st.lists(st.text(max_size=4), max_size=30), st.data())
def test_spans_are_the_completion(pieces, data):
    """Whatever its tokens are: empty ones, a marker across tokens, forced ones, several versions."""
    marker = "</t>"
    at = data.draw(st.integers(0, len(pieces)))
    pieces = [*pieces[:at], *data.draw(st.sampled_from([[], ["</t>"], ["x<", "/t", ">y"]])), *pieces[at:]]
    count, text = len(pieces), "".join(pieces)
    cut = data.draw(st.integers(0, count))
    row = {
        "step": 9, "group": 3, "index": 1, "prompt": "p", "answer": "a", "completion": text, "verdict": True,
        "reward": 1.0, "finish_reason": "stop", "token_ids": list(range(count)), "logprobs": [-0.25] * count,
        "pieces": pieces, "versions": [[4, 0, cut], [6, cut, count]], "forced": [[0, cut]],
    }  # fmt: skip
    drawn = samples.sample(row, marker)
    assert completion_of(drawn) == text
    thinking, _, answer = text.rpartition(marker)
    if marker in text:
        assert "".join(drawn["text"][: drawn["answer_from"]]) == thinking + marker
        assert "".join(drawn["text"][drawn["answer_from"] :]) == answer
    else:
        assert drawn["answer_from"] == len(drawn["text"])
    sampled = {i for i in range(count) if i >= cut}
    for place, ids in enumerate(drawn["ids"]):
        inside = sampled & set(ids)
        expected = pytest.approx(-0.25 * len(inside)) if inside else None
        assert drawn["logprob"][place] == expected
    assert sorted({i for ids in drawn["ids"] for i in ids}) == list(range(count))


def test_pieces_that_are_not_the_completion_are_refused():
    row = {**run_folders.sample(5, 1), "step": 5, "pieces": ["something else"]}
    with pytest.raises(ValueError, match="rollouts of step 5: group 1, completion 1: pieces"):
        samples.sample(row, "</think>")


def test_a_long_completion_keeps_its_ends(monkeypatch):
    monkeypatch.setattr(samples, "MOST_SPANS", 30)
    text = "".join(chr(97 + i % 26) for i in range(90)) + "</think>yes"
    drawn = samples.sample({**run_folders.sample(5, 1, text), "step": 5}, "</think>")
    assert drawn["left_out"] == [20, 71, 0] and drawn["tokens"] == 101
    assert completion_of(drawn) == text[:20] + text[-10:]
    assert "".join(drawn["text"][drawn["answer_from"] :]) == "yes"


def test_a_sample_without_token_texts_is_still_text():
    drawn = samples.sample({**run_folders.sample(5, 1), "step": 5, "pieces": []}, "</think>")
    assert drawn["text"] == ["<think>1+1=2</think>", "2"] and drawn["logprob"] == [None, None] and not drawn["pieces"]


# ---- the file ------------------------------------------------------------------------------------------------------


def test_what_a_rollout_says_stays_data(run, tmp_path):
    text = pathlib.Path(write_report([run], str(tmp_path / "page.html"))).read_text(encoding="utf-8")
    assert len(re.findall(r"<script", text)) == 3 and len(re.findall(r"</script", text)) == 3
    assert "onerror" not in text.replace(as_json(run_folders.HOSTILE)[1:-1], "")
    assert not {"\u2028", "\u2029", "\x00"} & set(text)
    told = [one for one in embedded(text)["runs"][0]["rollouts"]["samples"] if one["group"] == 50]
    assert told and all(completion_of(one) == one["prompt"] == one["expected"] == run_folders.HOSTILE for one in told)


@given(
    st.recursive(
        st.text() | st.floats(allow_nan=False, allow_infinity=False), lambda inner: st.lists(inner, max_size=4)
    )
)
def test_json_in_a_page_is_json_without_markup(value):
    text = as_json(value)
    assert json.loads(text) == value and text.isascii() and "<" not in text


def test_the_policy_names_what_is_in_the_page(data):
    text = render({"written": 0.0, "runs": [data]})
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    allowed = set(re.findall(r"sha256-([\w+/=]+)", policy))
    blocks = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks}
    assert len(hashes) == 3 and hashes == allowed
    assert policy.startswith("default-src &#x27;none&#x27;;")
    assert not re.search(r'\b(src|href)="(?!#|data:)', text) and "@import" not in text and "url(" not in text
    assert "Copyright (c) 2022 Leon Sorokin" in text and "(v1.6.32)" in text


def test_names_are_told_apart_and_escaped(tmp_path):
    folders = [run_folders.write_run(tmp_path / side / "<b>&", updates=2) for side in ("one", "two")]
    text = pathlib.Path(write_report(folders, str(tmp_path / "page.html"))).read_text(encoding="utf-8")
    assert "<title>one/&lt;b&gt;&amp;, two/&lt;b&gt;&amp; - scalerl-jax</title>" in text and "<b>" not in text
    assert [one["name"] for one in embedded(text)["runs"]] == ["one/<b>&", "two/<b>&"]


def test_the_page_is_there_whole_or_as_it_was(run, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")
    damaged = run_folders.write_run(tmp_path / "damaged", updates=2)
    pathlib.Path(damaged, "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: row 1 is not JSON"):
        write_report([run, damaged], str(path))
    assert path.read_text() == "before"


# ---- within a size -------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 500))
def test_groups_hold_every_point_once(count, most):
    groups = groups_of(count, most)
    assert len(groups) <= most
    assert [i for group in groups for i in range(group.start, group.stop)] == list(range(count))


def test_many_points_become_their_mean_least_and_most():
    values = [None if i == 3 else float(i) for i in range(1000)]
    drawn = thinned(values, groups_of(1000, 250))
    assert len(drawn["mean"]) == 250
    assert [drawn[name][0] for name in ("mean", "low", "high")] == [1.0, 0.0, 2.0]
    assert [drawn[name][-1] for name in ("mean", "low", "high")] == [997.5, 996.0, 999.0]


@given(st.integers(1, 60), st.integers(1, 60))
def test_an_even_choice_has_the_last(count, wanted):
    chosen = samples.evenly(list(range(count)), wanted)
    assert len(chosen) == min(count, wanted) and chosen[-1] == count - 1 and chosen == sorted(set(chosen))
    if wanted > 1:
        assert chosen[0] == 0


def test_samples_are_bounded_and_it_is_said(run, monkeypatch):
    everything = samples.rollouts(run, read_settings(run))
    assert (
        everything["whole"] and everything["written"] == everything["shown"] == 6 and len(everything["samples"]) == 48
    )
    size = len(json.dumps(everything["samples"]))
    halved = [samples.rollouts(run, read_settings(run), page_bytes=size // 2)]
    with monkeypatch.context() as delta:
        delta.setattr(samples, "READ_BYTES", size // 2)
        halved.append(samples.rollouts(run, read_settings(run)))
    for fewer in halved:
        assert fewer["written"] == 6 and 1 <= fewer["shown"] < 6
        assert len(json.dumps(fewer["samples"])) <= size // 2
        assert fewer["samples"][-1]["step"] == 30
    one = samples.rollouts(run, read_settings(run), page_bytes=size // 9)
    assert (
        not one["whole"]
        and one["shown"] == 1
        and 1 <= len(one["samples"]) < 8
        and len(json.dumps(one["samples"])) <= size // 9
    )
    monkeypatch.setattr(samples, "MOST_SAMPLES", 3)
    few = samples.rollouts(run, read_settings(run))
    assert len(few["samples"]) == 3 * 6 and not few["whole"]


# ---- runs that have hardly begun, folders that are none ------------------------------------------------------------


@pytest.mark.parametrize("missing", ["metrics.jsonl", "evals.jsonl", "rollouts"])
def test_a_run_that_lacks_something_has_a_page(tmp_path, missing):
    workdir = pathlib.Path(run_folders.write_run(tmp_path / "run", updates=5, every=5))
    target = workdir / missing
    if target.is_dir():
        for file in target.iterdir():
            file.unlink()
    else:
        target.write_text("")
    path = report([str(workdir)], None)
    assert path == str(workdir / "report.html") and embedded(pathlib.Path(path).read_text())["runs"][0]["name"] == "run"


def test_a_run_of_few_evaluations_says_why_there_is_no_curve(tmp_path):
    workdir = run_folders.write_run(tmp_path / "run", updates=6, every=2)
    curves = read_run(workdir)["score"]["curves"]["typical_hours"]
    assert curves == {"all": {"why": "3 evaluations above compute 0, of at least 4 that a curve needs"}}


def test_mistakes_have_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    begun = run_folders.write_run(tmp_path / "begun", updates=1)
    for name in ("metrics.jsonl", "evals.jsonl"):
        pathlib.Path(begun, name).write_text("")
    for workdirs, out, message in (
        ([], None, "no run folder given"),
        ([run, begun], None, "--out: no file given for the page of 2 runs"),
        ([run, run], "x.html", "is given twice"),
        ([str(tmp_path / "nowhere")], None, "no such folder"),
        ([str(tmp_path / "empty")], None, "is no run folder: it has no config.json"),
        ([begun], None, "holds no run yet"),
        ([run], str(pathlib.Path(begun, "config.json", "page.html")), "is not a folder"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            report(workdirs, out)
        assert "\n" not in str(caught.value)


def test_the_command(tmp_path):
    run, out = run_folders.write_run(tmp_path / "run", updates=4), tmp_path / "pages"
    out.mkdir()
    for arguments, code, said in (
        ([str(tmp_path), f"--out={out}"], 2, f"error: {tmp_path}: is no run folder: it has no config.json\n"),
        ([run, f"--out={out}"], 0, f"report: {out}/report.html\n"),
    ):
        result = run_command("scalerl_jax.report.command", *arguments)
        assert (result.returncode, result.stderr if code else result.stdout) == (code, said)
        assert (out / "report.html").exists() == (code == 0)
