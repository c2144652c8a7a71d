"""scalerl-verify as a user calls it."""

import json

import pytest

from scalerl_jax import verify
from scalerl_jax.config import Config, EnvironmentConfig
from tests.support.chat_folders import chat_folder
from tests.support.processes import run_python

BRIE = ["--environment=arithmetic", "--config.environment.reward=mine.py:brie"]


def run(folder, *arguments):
    return run_python("-c", "from launch.commands import verify; verify()", *arguments, folder=folder)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    jsonl(
        tmp_path / "answers.jsonl",
        [
            {"prompt": "1+1?", "completion": "<think>so</think>It is \\boxed{2}", "answer": 2, "level": 1},
            {"completion": "[bold]\x1b[31mthree[/bold]", "answer": "3"},
            {"completion": "0.75", "answer": "3/4"},
            {"completion": "<think>never", "answer": "1"},
        ],
    )
    (tmp_path / "mine.py").write_text(
        "def brief(completion, level=0):\n    return 1.0 if len(completion) < 5 else level\n"
        "def broken(completion):\n    return 1 / 0\n"
    )
    return tmp_path


def test_it_says_what_was_read_and_what_was_wanted(folder):
    done = run(folder, "answers.jsonl", "--out=scores.jsonl")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[3] for line in lines[1:5]] == ["yes", "no", "yes", "no"]
    assert "said 0.75, wanted 3/4" in lines[3] and "nothing follows the thinking" in lines[4]
    assert "\x1b" not in done.stdout and "[bold]" in lines[2]
    assert "4 rows: 2 correct (50.0%), mean reward 0.000" in lines
    assert lines[-1].startswith("time of a row: ") and "answers.jsonl row " in lines[-1]
    rows = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [row["score"]["correct"] for row in rows] == [True, False, True, False]
    assert rows[0]["level"] == 1 and rows[2]["score"]["answer"] == "3/4" and rows[0]["score"]["seconds"] >= 0


def test_rewards_of_ones_own_and_rows_that_are_not_shown(folder):
    done = run(
        folder, "answers.jsonl", "--show=1", '--config.environment.rewards={"mine.py:brief": 1, "environment": 0.5}'
    )
    assert done.returncode == 0, done.stderr
    assert "... and 3 more rows: --show=0 shows all" in done.stdout
    assert "rewards/brief: 0.667 (of 3 rows)" in done.stdout and "4 rows: 2 correct" in done.stdout


def test_a_function_that_fails_is_said_once(folder):
    jsonl(folder / "thought.jsonl", [{"completion": f"{n}"} for n in range(3)])
    done = run(folder, "thought.jsonl", "--environment=arithmetic", "--config.environment.reward=mine.py:broken")
    assert done.returncode == 1 and "3 could not be scored" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: none of 3 rows could be scored: config.environment.reward=")
    assert done.stdout.count("(of 3 rows)") == 1
    warnings = "\n".join(done.stderr.splitlines()[:-1])
    assert warnings.count("ZeroDivisionError: division by zero (mine.py line 4)") == 1
    assert "rewards/broken/errors: 1.000 (of 3 rows)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no file given, as in scalerl-verify ANSWERS.jsonl"),
        (["nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["bad.jsonl"], "bad.jsonl row 2: has no text 'completion' (keys: answer)"),
        (["empty.jsonl"], "empty.jsonl: no rows there"),
        (["unanswered.jsonl"], "unanswered.jsonl row 1: has no 'answer' (keys: prompt; wanted: prompt, answer; conf"),
        (["answers.jsonl", "--environment=maths"], "config.environment.name='maths': is not one of arithmetic, math"),
        (["answers.jsonl", "--environment=programs"], "answers.jsonl row 1: there are no unit tests (keys: "),
        (["answers.jsonl", "--out=answers.jsonl"], "--out=answers.jsonl: is the file that is read"),
        (["gsm8k:answers.jsonl", "--out=answers.jsonl"], "--out=answers.jsonl: is the file that is read"),
        (["answers.jsonl", "--out=."], "--out=.: is a folder"),
        (["answers.jsonl", "--out="], "--out=: is empty"),
        (["answers.jsonl", *BRIE], "mine.py has no brie (it has: brief, broken)"),
        (["answers.jsonl", "--thinking=maybe"], "thinking"),
        (["answers.jsonl", "--config=nowhere.py"], "--config=nowhere.py: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(folder, arguments, said):
    jsonl(folder / "bad.jsonl", [{"completion": "1", "answer": "1"}, {"answer": "1"}])
    jsonl(folder / "unanswered.jsonl", [{"completion": "1"}])
    (folder / "empty.jsonl").write_text("\n")
    before = sorted(folder.iterdir())
    done = run(folder, *arguments)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_a_function_that_ends_its_process_is_named_and_counted(folder):
    (folder / "ends.py").write_text("import os\n\ndef ends(completion):\n    return os._exit(1) if completion else 0\n")
    jsonl(folder / "one.jsonl", [{"completion": "1"}])
    done = run(folder, "one.jsonl", "--environment=arithmetic", "--config.environment.reward=ends.py:ends")
    assert done.returncode == 1 and "rewards/ends/errors: 1.000 (of 1 rows)" in done.stdout
    assert done.stderr.count("config.environment.reward=ends.py:ends: the process that scored it ended") == 1


def test_rows_of_a_published_layout(folder):
    rows = [{"question": "1+1?", "answer": "It is\n#### 2", "completion": said} for said in ("2", "3")]
    jsonl(folder / "gsm.jsonl", rows)
    done = run(folder, "gsm8k:gsm.jsonl")
    assert done.returncode == 0 and "2 rows: 1 correct (50.0%)" in done.stdout, done.stderr
    done = run(folder, "gsm8k:gsm.jsonl", "--environment=code")
    assert done.returncode == 2 and "gsm8k: is a layout for config.environment.name=math" in done.stderr


def test_prompts_are_shown_as_a_run_asks_them(folder):
    chat_folder(folder / "model", "qwen3")
    rows = [{"prompt": f"{n}+1?\x1b[31m", "answer": n + 1, "task": "sums"} for n in range(6)]
    jsonl(folder / "train.jsonl", [*rows, rows[0], {"answer": 1}])
    done = run(
        folder, "--prompts=2", "--config.model.path=model",
        "--config.environment.name=math", "--config.environment.train=train.jsonl", "--config.evaluation.prompts=2",
        "--config.environment.max_malformed_rows=1", "--config.environment.chat_template=always",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "malformed rows left out: 1" in said and "rows left out since they repeat a prompt: 1" in said
    assert "4 training prompts, 2 held out" in said and "tokens that end a completion: " in said
    assert said.count("<|im_start|>user") == 4 and "\x1b" not in said
    assert said.count("training prompt, train.jsonl row ") == 2 == said.count("held-out prompt, train.jsonl row ")
    assert "answer '1', task sums" in said or "answer '2', task sums" in said
    done = run(folder, "--prompts=2", "answers.jsonl")
    assert done.returncode == 2 and "--prompts judges nothing: it goes without files" in done.stderr
    done = run(folder, "--prompts=2")
    assert done.returncode == 2 and "config.model.path is empty" in done.stderr


def test_malformed_rows_are_skipped_up_to_a_limit(folder):
    jsonl(folder / "bad.jsonl", [{"completion": "1", "answer": "1"}, {"answer": "1"}])
    done = run(folder, "bad.jsonl", "--environment=arithmetic", "--config.environment.max_malformed_rows=1")
    assert done.returncode == 0 and "1 rows: 1 correct" in done.stdout
    assert "left out" in done.stderr and "bad.jsonl row 2: has no text 'completion'" in done.stderr


def test_malformed_rows_of_a_mixture_are_skipped_up_to_the_most_of_its_parts(tmp_path, capsys):
    jsonl(tmp_path / "bad.jsonl", [{"completion": "1", "environment": "one"}, {"environment": "one"}])
    config = Config()
    config.mixture = {name: EnvironmentConfig(reward="judge") for name in ("one", "two")}
    with pytest.raises(ValueError, match=r"row 2: has no text .* \(config\.mixture\.one\.max_malformed_rows lets such"):
        list(verify.read_rows([f"{tmp_path}/bad.jsonl"], config))
    config.mixture["two"].max_malformed_rows = 1
    assert len(list(verify.read_rows([f"{tmp_path}/bad.jsonl"], config))) == 1
    assert "malformed rows left out: 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "how", "parts"),
    [
        ("<think>a</think>b", "auto", ("a", "b")),
        ("a</think>b", "auto", ("a", "b")),
        ("b", "auto", ("", "b")),
        ("<think>a", "auto", ("a", None)),
        ("b", "always", ("b", None)),
        ("<think>a</think>b", "never", ("", "<think>a</think>b")),
    ],
)
def test_what_follows_the_thinking(text, how, parts):
    assert verify.split(text, Config(), thinking=how) == parts


@pytest.mark.slow
def test_with_a_config_the_prompt_says_whether_thinking_is_open(folder):
    """As the run's own scorer has it: a template that opens thinking is the same as a text that does."""
    jsonl(
        folder / "thought.jsonl",
        [
            {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "So 3?</think>\\boxed{2}", "answer": "2"},
            {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "\\boxed{2}", "answer": "2"},
        ],
    )
    (folder / "my_config.py").write_text(
        "from scalerl_jax.config import Config\n\ndef get_config():\n    config = Config()\n"
        "    config.environment.name = 'math'\n    config.rollout.thinking_budget_min = 0\n"
        "    config.rollout.thinking_budget_max = 0\n    return config\n"
    )
    for style, correct in (("deepseek_r1", [True, False]), ("qwen2_5", [True, True])):
        chat_folder(folder / style, style)
        done = run(folder, "thought.jsonl", "--config=my_config.py", f"--config.model.path={style}", "--out=s.jsonl")
        assert done.returncode == 0, done.stderr
        scores = [json.loads(line)["score"] for line in (folder / "s.jsonl").read_text().splitlines()]
        assert [score["correct"] for score in scores] == correct
        assert ("nothing follows the thinking" in scores[1]["why"]) is (style == "deepseek_r1")
    done = run(folder, "thought.jsonl", "--config=my_config.py", "--config.model.path=gone")
    assert "gone/tokenizer.json: no such file, so prompts are not rendered" in done.stderr and done.returncode == 0


@pytest.mark.parametrize("environment", ["code", "programs"])
def test_code_is_run_against_the_rows_tests(folder, environment):
    """With the sandbox, where there is one; without, the line that says what is missing."""
    tests = [{"type": "stdin_stdout", "input": "2\n", "output": "4\n"}]
    program = "```python\nprint(int(input()) * {})\n```"
    jsonl(folder / "code.jsonl", [{"completion": program.format(n), "tests": tests} for n in (2, 3)])
    done = run(folder, "code.jsonl", f"--environment={environment}")
    if done.returncode == 2:
        assert "bubblewrap" in done.stderr.splitlines()[-1] or "bwrap" in done.stderr.splitlines()[-1]
        return
    assert done.returncode == 0, done.stderr
    assert "2 rows: 1 correct" in done.stdout
