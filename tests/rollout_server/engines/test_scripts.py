"""What a replay engine plays: the same for the same name, within the budgets, and a recording is played to the bit."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.contract import codec
from tests.rollout_server.client import INCARNATION, STOP, Served, group, random_weights, serving
from tests.rollout_server.conftest import ENGINES
from tests.support.replay.scripts import Recorded, Scripted, recorded_row

PHRASE = codec.Interruption(text_token_ids=(40, 41, 42), end_of_thinking_token_ids=(42,))


@given(
    thinking_budget=st.integers(0, 30),
    answer_budget=st.integers(1, 30),
    index=st.integers(0, 1000),
    name=st.text(max_size=8),
)
def test_a_made_up_completion_keeps_to_its_budgets(
    thinking_budget: int, answer_budget: int, index: int, name: str
) -> None:
    script = Scripted(vocabulary=64, minimum_tokens=1, mean_tokens=12)
    request = group(
        name, indices=range(index, index + 1), thinking_budget=thinking_budget, answer_budget=answer_budget,
        interruption=PHRASE,
    )  # fmt: skip
    wanted = request.completions[0]
    rollout = script.rollout(request, wanted)
    tokens = rollout.token_ids.tolist()
    answer = tokens
    if thinking_budget:
        thinking = tokens.index(42) + 1
        answer = tokens[thinking:]
        if rollout.forced:
            assert rollout.forced == ((thinking_budget, thinking_budget + 3),)
            assert thinking == thinking_budget + 3
        else:
            assert thinking <= thinking_budget
    assert 1 <= len(answer) <= answer_budget
    assert tokens.count(STOP) == (rollout.finish_reason == "stop") == (tokens[-1] == STOP)
    assert rollout.finish_reason == "stop" or len(answer) == answer_budget
    for start, end in rollout.forced:
        assert not rollout.logprobs[start:end].any()
    assert (rollout.logprobs <= 0).all() and (rollout.logprobs > -8 - np.log(64)).all()
    again = script.rollout(request, wanted)
    assert (again.token_ids.tobytes(), again.logprobs.tobytes()) == (
        rollout.token_ids.tobytes(), rollout.logprobs.tobytes(),
    )  # fmt: skip


def test_every_part_of_the_name_counts() -> None:
    script, base = Scripted(vocabulary=64), group(completions=1, answer_budget=20, stop_token_ids=())
    reseeded = dataclasses.replace(base, completions=(dataclasses.replace(base.completions[0], seed=7),))
    others = [
        base,
        reseeded,
        dataclasses.replace(base, group_id="train/1"),
        dataclasses.replace(base, prompt=np.array([7, 8, 10], np.int32)),
        group(indices=range(1, 2), answer_budget=20, stop_token_ids=()),
    ]
    assert len({script.rollout(other, other.completions[0]).token_ids.tobytes() for other in others}) == len(others)


def test_a_cut_keeps_what_is_before_it() -> None:
    script = Scripted(vocabulary=64, minimum_tokens=20, mean_tokens=20)
    request = group(thinking_budget=5, interruption=PHRASE)
    whole = script.rollout(request, request.completions[0])
    assert whole.forced == ((5, 8),)
    for limit in range(1, len(whole.token_ids)):
        part = whole.cut(limit)
        assert part.token_ids.tolist() == whole.token_ids[:limit].tolist()
        assert (len(part.logprobs), part.finish_reason) == (limit, "length")
        assert part.forced == (() if limit <= 5 else ((5, min(limit, 8)),))
    assert whole.cut(len(whole.token_ids)) is whole


async def record(served: Served, path: pathlib.Path, *, named: bool) -> list[codec.Completion]:
    await served.push(codec.Version(INCARNATION, 0), random_weights(served.engine, 1))
    wanted = group(completions=6, thinking_budget=12, answer_budget=8, interruption=PHRASE)
    completions = await served.generate(wanted)
    rows = [json.dumps(recorded_row(wanted.prompt, c, named=named)) for c in completions]
    path.write_text("\n".join(rows) + "\n")
    return completions


async def test_a_recording_is_played_to_the_bit(
    make_engine: object, model_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Recorded from either engine over gRPC, played over gRPC."""
    path = tmp_path / "rollouts.jsonl"
    async with serving(make_engine()) as served:  # type: ignore[operator]
        recorded = await record(served, path, named=True)
    player = ENGINES["replay"](model_folder, script=Recorded(path))
    async with serving(player) as served:
        await served.push(codec.Version(INCARNATION, 0), random_weights(served.engine, 1))
        played = await served.generate(group(completions=6))
        for a, b in zip(recorded, played, strict=True):
            assert (a.token_ids.tobytes(), a.logprobs.tobytes()) == (b.token_ids.tobytes(), b.logprobs.tobytes())
            assert (a.index, a.forced, a.finish_reason) == (b.index, b.forced, b.finish_reason)
            scored, _ = await served.score(np.concatenate([group().prompt, a.token_ids]))
            assert scored[3:].tobytes() == a.logprobs.tobytes()


async def test_a_bank_plays_any_group_of_a_known_prompt(model_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    async with serving(ENGINES["replay"](model_folder)) as served:
        recorded = {c.token_ids.tobytes() for c in await record(served, path, named=False)}
    script = Recorded(path)
    seen = set()
    for number in range(20):
        request = group(f"train/{number}", completions=4)
        seen |= {script.rollout(request, wanted).token_ids.tobytes() for wanted in request.completions}
    assert seen == recorded
    stranger = group(prompt=np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="no completion 0 of this prompt"):
        script.rollout(stranger, stranger.completions[0])


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        '{"prompt_token_ids": [1], "token_ids": [2]}',
        '{"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1, -2], "finish_reason": "stop"}',
        '{"prompt_token_ids": [1], "token_ids": [], "logprobs": [], "finish_reason": "stop"}',
        '{"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1], "finish_reason": "aborted"}',
    ],
)
def test_a_row_that_is_no_completion(tmp_path: pathlib.Path, row: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    good = '{"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1], "finish_reason": "stop"}'
    path.write_text(f"{good}\n{row}\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:2: not a completion"):
        Recorded(path)
