"""Unit tests as the published data sets have them, and as they should not be."""

import base64
import json
import os
import pickle
import tracemalloc
import zlib

import pytest

from scalerl_jax.environments.code_tests import find_tests, longest

STDIN = {"function": "", "cases": [["1 2\n", ["3\n"]], ["4 5\n", ["9\n"]]]}
CALL = {"function": "add", "cases": [[[1, 2], [3]], [[4, 5], [9]]]}


def packed(text):
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]
LINES = [{"input": "1\n2", "output": "3"}, {"input": "4\n5", "output": "9"}]


def each(tests, **more):
    return [{**test, **more} for test in tests]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        # DeepCoder: primeintellect, lcbv5, taco, codeforces
        ({"tests": json.dumps(each(PAIRS, type="stdin_stdout"))}, STDIN),
        ({"tests": repr(each(PAIRS, type="stdin_stdout", fn_name=None))}, STDIN),
        ({"tests": json.dumps(each(PAIRS, testtype="stdin", metadata={"func_name": None}))}, STDIN),
        ({"tests": json.dumps(PAIRS)}, STDIN),
        ({"tests": json.dumps({"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]})}, STDIN),
        ({"tests": PAIRS}, STDIN),
        ({"tests": json.dumps(each(LINES, testtype="functional", metadata={"func_name": "add"}))}, CALL),
        (
            {"tests": json.dumps([{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}])},
            {"function": "add", "cases": [[[1, 2], [[3], 3]]]},
        ),
        # LiveCodeBench
        ({"public_test_cases": json.dumps(each(PAIRS[:1], testtype="stdin")),
          "private_test_cases": packed(json.dumps(each(PAIRS[1:], testtype="stdin"))), "metadata": "{}"}, STDIN),
        ({"public_test_cases": json.dumps(each(LINES[:1], testtype="functional")),
          "private_test_cases": json.dumps(each(LINES[1:], testtype="functional")),
          "metadata": '{"func_name": "add"}'}, CALL),
        ({"private_test_cases": packed(json.dumps(each(PAIRS, testtype="stdin")))}, STDIN),
        # TACO, APPS
        ({"input_output": json.dumps({"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]})}, STDIN),
        ({"input_output": json.dumps({"inputs": [["1 2", ""], ["4 5", ""]], "outputs": [["3", ""], ["9", ""]]})},
         STDIN),
        ({"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [4, 5]], "outputs": [3, 9]})}, CALL),
        ({"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})},
         {"function": "add", "cases": [[[1, 2], [[3], 3]]]}),
        ({"tests": None, "input_output": {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}}, STDIN),
        ({"tests": json.dumps([{"input": 5, "output": 2.5}])}, {"function": "", "cases": [["5", ["2.5"]]]}),
    ],
)  # fmt: skip
def test_layouts(columns, wanted):
    tests = find_tests(columns, "tests")
    assert tests == wanted
    assert json.loads(json.dumps(tests)) == tests


class Runs:
    """Pickled so that reading it would run something."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"problem": "?", "answer": "!"}, "no unit tests (keys: problem, answer; wanted: tests, input_output or"),
        ({"tests": "nonsense ["}, "'tests' is not JSON ("),
        ({"tests": "[" * 100_000}, "'tests' is nested too deeply"),
        ({"tests": ""}, "'tests' is not JSON"),
        ({"tests": "5"}, "'tests' is neither a list of tests nor"),
        ({"tests": "[]"}, "'tests' has no tests"),
        ({"tests": "[5]"}, "test 1 of 'tests' is not an object with 'input' and 'output'"),
        ({"tests": '[{"input": "1"}]'}, "test 1 of 'tests' is not an object with 'input' and 'output'"),
        ({"tests": '[{"input": "1", "output": null}]'}, "test 1 of 'tests': its input or output is NoneType"),
        ({"tests": '[{"input": "1", "output": "\\ud800"}]'}, "half of a surrogate pair"),
        ({"tests": '[{"input": "1", "output": "1", "type": "shell"}]'}, "its type is 'shell'"),
        ({"tests": '[{"input": "1", "output": "1", "type": "function_call"}]'}, "does not say which"),
        ({"tests": '[{"input": "1", "output": "1", "type": "function_call", "fn_name": "a b"}]'}, "no function's name"),
        ({"tests": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        ({"tests": '{"inputs": "1", "output": "1"}'}, "no lists 'inputs' and 'outputs' (keys: inputs, output)"),
        ({"tests": json.dumps(each(LINES, type="function_call", fn_name="f") + each(LINES, type="function_call",
          fn_name="g"))}, "tests several functions: f, g"),
        ({"tests": '[{"input": "1 2", "output": "3", "testtype": "functional", "fn_name": "f"}]'}, "no JSON"),
        ({"private_test_cases": "!"}, "'private_test_cases' is neither JSON nor base64 of zlib"),
        ({"private_test_cases": base64.b64encode(b"no zlib").decode()}, "neither JSON nor base64 of zlib"),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"no pickle")).decode()}, "neither JSON nor base64"),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"")).decode()}, "neither JSON nor base64"),
        ({"private_test_cases": packed([1])}, "EMPTY_LIST is no part of a pickled text"),
        ({"private_test_cases": packed("5")}, "is no list of tests"),
        ({"private_test_cases": packed(Runs())}, "is no part of a pickled text"),
        ({"private_test_cases": "ä"}, "'private_test_cases' is neither JSON nor base64"),
    ],
)  # fmt: skip
def test_what_is_no_layout_is_one_line(columns, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as raised:
        find_tests(columns, "tests")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert os.listdir() == []


def test_what_unpacks_to_too_much(monkeypatch):
    monkeypatch.setattr("scalerl_jax.environments.code_tests.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="is cut, or has more than 1000 bytes"):
        find_tests({"private_test_cases": packed("x" * 10_000)}, "tests")


def test_the_column_of_the_config_comes_first():
    other = json.dumps([{"input": "0", "output": "0"}])
    assert find_tests({"checks": json.dumps(PAIRS), "tests": other, "input_output": other}, "checks") == STDIN


def test_the_longest():
    tests = find_tests({"tests": [{"input": "x" * n, "output": str(n)} for n in (3, 9, 1, 9, 5)]}, "tests")
    assert [case[1][0] for case in longest(tests, 3)["cases"]] == ["9", "9", "5"]
    assert [case[1][0] for case in longest(tests, 2)["cases"]] == ["9", "9"]
    assert longest(tests, 0) == longest(tests, 5) == longest(tests, 99) == tests


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("padding", [0, 300, 70_000], ids=["short", "one frame", "beyond a frame"])
def test_a_text_of_every_protocol_is_read(protocol, padding):
    text = json.dumps(PAIRS, ensure_ascii=False) + " " * padding + "\n"
    data = base64.b64encode(zlib.compress(pickle.dumps(text, protocol=protocol))).decode()
    assert find_tests({"private_test_cases": data}, "tests") == STDIN


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8d" + (2**36).to_bytes(8, "little") + b"x.",  # BINUNICODE8
        b"\x80\x04\x8e" + (2**36).to_bytes(8, "little") + b"x.",  # BINBYTES8
        b"\x80\x05\x96" + (2**36).to_bytes(8, "little") + b"x.",  # BYTEARRAY8
        b"\x80\x04\x95" + (2**36).to_bytes(8, "little") + b"x.",  # FRAME
        b"\x80\x02\x8b\xff\xff\xff\x7fx.",  # LONG4
        b"\x80\x02X\xff\xff\xff\xffx.",  # BINUNICODE
        b"X\1\0\0\0xr\xff\xff\xff\x7f" + b"0.",  # LONG_BINPUT, then POP
        b"X\1\0\0\0x" + b"q\0" * 10**6 + b".",
    ],
)
def test_a_few_bytes_take_no_room(data):
    """Nothing is made for what they name and do not hold: pickle itself takes 64 GiB for some of them."""
    column = base64.b64encode(zlib.compress(data)).decode()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="is neither JSON nor base64 of zlib of a pickled text"):
            find_tests({"private_test_cases": column}, "tests")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
