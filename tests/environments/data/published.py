"""A row of every published layout, in the columns that are published, and what it is: prompt, answer, task."""

import json
from typing import Any

INPUTS = '{"inputs": ["1"], "outputs": ["2"]}'
ASKED = [{"role": "user", "content": "Solve: 2+2?"}]
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "polaris": ({"problem": "2+2?", "answer": "4", "difficulty": "3/8"}, ("2+2?", "4", "")),
    "deepscaler": ({"problem": "2+2?", "answer": "4", "solution": "Count."}, ("2+2?", "4", "")),
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": ASKED,
            "ability": "MATH",
            "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        ("Solve: 2+2?", "4", ""),
    ),
    "math500": (
        {
            "problem": "2+2?",
            "solution": "Count: $\\boxed{4}$",
            "answer": "4",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        ("2+2?", "4", "level 2"),
    ),
    "aime24": (
        {"id": 60, "problem": "2+2?", "solution": "Count.", "answer": "004", "url": "https://x", "year": "2024"},
        ("2+2?", "004", ""),
    ),
    "aime25": ({"problem": "2+2?", "answer": "4", "id": "0"}, ("2+2?", "4", "")),
    "aime26": ({"problem_idx": 1, "answer": 4, "problem": "2+2?"}, ("2+2?", "4", "")),
    "gsm8k": ({"question": "2+2?", "answer": "Two and two are <<2+2=4>>4.\n#### 1,004"}, ("2+2?", "1004", "")),
    "deepcoder": (
        {
            "problem": "Double it.",
            "tests": '[{"input": "1", "output": "2", "type": "stdin_stdout"}]',
            "solutions": ["x"],
        },
        ("Double it.", "", ""),
    ),
    "livecodebench": (
        {
            "question_title": "Double",
            "question_content": "Double it.",
            "platform": "leetcode",
            "question_id": "1",
            "contest_id": "1",
            "contest_date": "2024-01-01T00:00:00",
            "starter_code": "class Solution:\n    def double(self, x: int) -> int:\n        ",
            "difficulty": "easy",
            "public_test_cases": '[{"input": "1", "output": "2", "testtype": "functional"}]',
            "private_test_cases": "[]",
            "metadata": '{"func_name": "double"}',
        },
        (
            "Double it.\n\nGo on from this code:\n\n"
            "```python\nclass Solution:\n    def double(self, x: int) -> int:\n```",
            "",
            "easy",
        ),
    ),
    "taco": (
        {
            "question": "Double it.",
            "solutions": "[]",
            "starter_code": "",
            "input_output": '{"inputs": ["1"], "outputs": ["2"]}',
            "difficulty": "EASY",
            "Expected Auxiliary Space": None,
        },
        ("Double it.", "", "EASY"),
    ),
    "verl": ({"prompt": ASKED, "ability": "math", "reward_model": {"ground_truth": "4"}}, ("Solve: 2+2?", "4", "")),
    "verl_code": (
        {"prompt": ASKED, "ability": "code", "reward_model": {"ground_truth": INPUTS, "style": "rule"}},
        ("Solve: 2+2?", "", ""),
    ),
    "skywork": (
        {"prompt": ASKED, "ability": "math", "reward_model": {"ground_truth": '["\\\\frac{1}{2}", "0.5"]'}},
        ("Solve: 2+2?", "\\frac{1}{2}", ""),
    ),
    "skywork_code": (
        {
            "prompt": ASKED,
            "reward_model": {
                "ground_truth": json.dumps(
                    {
                        "import_prefix": "from typing import *\n\n",
                        "test_code": "def check(candidate):\n    assert candidate(x = 1) == 2\n"
                        "    assert candidate(2) == 4",
                        "entry_point": "Solution().double",
                    }
                )
            },
        },
        ("Solve: 2+2?", "", ""),
    ),
    "intellect2": (
        {"prompt": "2+2?", "task_type": "verifiable_math", "verification_info": '{"ground_truth": "4"}'},
        ("2+2?", "4", ""),
    ),
    "intellect2_code": (
        {
            "prompt": "Double it.",
            "task_type": "verifiable_code",
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}
            ),
        },
        ("Double it.", "", ""),
    ),
    "synthetic1": (
        {"prompt": "2+2?", "task_type": "verifiable_math", "verification_info": "{'ground_truth': '4'}"},
        ("2+2?", "4", ""),
    ),
    "synthetic1_code": (
        {
            "prompt": "Double it.",
            "task_type": "verifiable_code",
            "verification_info": json.dumps({"test_cases": json.dumps({"inputs": ["1"], "outputs": ["2"]})}),
        },
        ("Double it.", "", ""),
    ),
    "orz": (
        {"0": {"from": "human", "value": "2+2?"}, "1": {"from": "assistant", "ground_truth": {"value": "4"}}},
        ("2+2?", "4", ""),
    ),
    "openthoughts": (
        {"problem": "2+2?", "ground_truth_solution": "So $\\boxed{\\frac{8}{2}}$.", "domain": "math", "source": "amc"},
        ("2+2?", "\\frac{8}{2}", ""),
    ),
    "openthoughts_code": (
        {"problem": "Double it.", "domain": "code", "test_cases": INPUTS, "starter_code": None},
        ("Double it.", "", ""),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'import math\n\ndef double(x: int) -> int:\n    """ Twice x. """\n',
            "canonical_solution": "    return 2 * x\n",
            "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
            "    for x in range(9):\n        assert candidate(x) == x + x\n",
            "entry_point": "double",
        },
        (
            "Write this function, with what it needs:\n\n```python\nimport math\n\ndef double(x: int) -> int:\n"
            '    """ Twice x. """\n```',
            "",
            "",
        ),
    ),
    "mbpp": (
        {"text": "Double it.", "code": "x", "test_list": ["assert double(1) == 2"], "test_setup_code": ""},
        ("Double it.\n\nIt should pass this test:\n\n```python\nassert double(1) == 2\n```", "", ""),
    ),
    "mbpp_sanitized": (
        {
            "prompt": "Double it.",
            "code": "x",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(double(1), 2)", "assert double((1, 2)) == (1, 2, 1, 2)"],
        },
        ("Double it.\n\nIt should pass this test:\n\n```python\nassert math.isclose(double(1), 2)\n```", "", ""),
    ),
    "kodcode": (
        {
            "question": "Double it.",
            "solution": "x",
            "test": "import pytest\nfrom solution import double\n\ndef test_one():\n    assert double(1) == 2\n\n"
            "def test_none():\n    with pytest.raises(TypeError):\n        double(None)\n",
            "test_info": [{"function_name": "double", "function_declaration": "def double(x):"}],
        },
        ("Double it.\n\nDeclare the function like this:\n\n```python\ndef double(x):\n```", "", ""),
    ),
    "codecontests": (
        {
            "description": "Double it.",
            "input_file": "",
            "public_tests": {"input": ["1"], "output": ["2"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["4"], "output": ["8"]},
        },
        ("Double it.", "", ""),
    ),
}
# Whose columns are those of others too, or say too little.
LOOKS = {"aime25": "", "verl": "dapo", "skywork": "dapo", "skywork_code": "verl_code", "intellect2": "synthetic1"}
LOOKS |= {"intellect2_code": "synthetic1_code"}
