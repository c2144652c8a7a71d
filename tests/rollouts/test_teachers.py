"""Teachers over real gRPC: what they say of completions, who is believed, and what becomes of those that are not."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.environments import Row
from scalerl_jax.rollouts import teachers as teachers_lib
from scalerl_jax.rollouts.loop_thread import LoopThread
from scalerl_jax.rollouts.parity import LIMITS_WITH_EXPERTS
from scalerl_jax.rollouts.servers import teacher_server
from scalerl_jax.rollouts.servers.validate_status import Expected, FleetError
from scalerl_jax.rollouts.teachers import Teachers, Where, where_of
from tests.rollouts.liar import Liar
from tests.rollouts.small_trainer import VOCABULARY, Trainer, config, row
from tests.support.replay.scripts import Scripted
from tests.support.waiting import SECONDS, eventually

EXPECTED = Expected("replay", f'{{"vocab_size": {VOCABULARY}}}', "float32", maximum_tokens=256)
SCRIPT = Scripted(vocabulary=VOCABULARY)
K = 5


def completion(seed: int = 0, tokens: int = 9, **changes) -> codec.Completion:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype(np.int32)
    zeros, versions = np.zeros(tokens, np.float32), ((0, 0, tokens),)
    return dataclasses.replace(codec.Completion(0, "train/0", 0, ids, zeros, versions, (), "stop"), **changes)


def truth(of: Row, said: codec.Completion) -> np.ndarray:
    """What the teacher says of prompt and completion: 0 for the prompt, which is not asked for."""
    prompt = of.token_ids if said.prompt is None else said.prompt
    return np.where(
        np.arange(len(prompt) + len(said.token_ids)) < len(prompt),
        0,
        SCRIPT.score(np.concatenate([prompt, said.token_ids])),
    )


class Asked:
    """Teachers on a loop of their own."""

    def __init__(self, thread: LoopThread, teachers: Teachers):
        self.thread, self.teachers = thread, teachers

    def later(self, of: Row, *said: codec.Completion):
        async def score() -> list[tuple[TeacherScores, ...]]:
            return await asyncio.gather(*(self.teachers.score(of, one) for one in said))

        return asyncio.run_coroutine_threadsafe(score(), self.thread._loop)

    def __call__(self, of: Row, *said: codec.Completion) -> list[tuple[TeacherScores, ...]]:
        return self.later(of, *said).result(SECONDS)

    def admitted(self) -> int:
        """How many servers."""
        return sum(s.admitted for one in self.teachers._teachers.values() for s in one._servers.values())

    def failure(self) -> str:
        return str(eventually(lambda: self.thread._failure))


def make(
    *liars: Liar,
    form: str = "sampled",
    seconds: float = SECONDS,
    observe=lambda status, from_here: None,
    **wheres: Where,
) -> Teachers:
    made = config(objective_distill=form, distill_k=K, distill_seconds=seconds, fleet_discovery_seconds=0.05)
    where = wheres or {"tutor": Where(tuple(liar.address for liar in liars))}
    made.distill.teachers = dict.fromkeys(where, "here")
    made.distill.column = "tutor" if len(where) > 1 else ""
    prompt = row(0).token_ids
    return Teachers(made, where, prompt=prompt, expected=EXPECTED, limits=LIMITS_WITH_EXPERTS, observe=observe)


@contextlib.contextmanager
def asking(*liars: Liar, students=list, **options) -> Iterator[Asked]:
    thread, teachers = LoopThread("teachers"), make(*liars, **options)
    thread.start(lambda: teachers.begin(thread, fail=thread.fail, students=students))
    try:
        yield Asked(thread, teachers)
    finally:
        thread.close()


@pytest.fixture
def second():
    with Liar() as liar:
        yield liar


def change(reply: pb.ScoreReply, **to) -> pb.ScoreReply:
    for name, value in to.items():
        setattr(reply, name, codec.encode_floats(np.asarray(value, np.float32)))
    return reply


def shifted(reply: pb.ScoreReply, by: float) -> pb.ScoreReply:
    names = ("logprobs", "top_logprobs", "target_logprobs")
    return change(reply, **{name: codec.decode_floats(getattr(reply, name)) - by for name in names})


def test_every_branch_is_scored_and_nothing_is_asked_twice(liar):
    other = completion(7, prompt=np.array([3, 1, 4, 1], np.int32))
    said = completion(1, others=(other,))
    with asking(liar) as ask:
        (branches,) = ask(row(2), said)
        for scores, branch in zip(branches, said.branches, strict=True):
            np.testing.assert_allclose(scores.logprobs, truth(row(2), branch), atol=1e-6)
            assert scores.ids is None
        asked = liar.calls["scored"]
        again = ask(row(2), said, completion(1))
        assert liar.calls["scored"] == asked
        assert again[0][0] is not None and (again[1][0].logprobs == branches[0].logprobs).all()
        metrics = ask.teachers.drain()["tutor"]
        assert (metrics["sequences"], metrics["cached"], metrics["sent_away"]) == (2, 3, 0)
        assert metrics["tokens"] == 3 + 9 + 4 + 9 and metrics["seconds"] > 0


def test_what_is_kept_is_bounded(liar, monkeypatch):
    monkeypatch.setattr(teachers_lib, "CACHE_BYTES", 100)  # two of nine tokens
    with asking(liar) as ask:
        for seed in (0, 1, 2, 2, 0):
            ask(row(0), completion(seed))
        assert ask.teachers.drain()["tutor"]["cached"] == 1


def test_the_teachers_top_k(liar):
    with asking(liar, form="topk_forward") as ask:
        ((scores,),) = ask(row(0), completion(1))
        told = SCRIPT.scores(codec.ScoreRequest(np.concatenate([row(0).token_ids, completion(1).token_ids]), 3, K))
        np.testing.assert_array_equal(scores.ids[3:], told.top_ids)
        np.testing.assert_allclose(scores.top_logprobs[3:], told.top_logprobs, atol=1e-6)
        assert scores.ids.shape == (12, K) and (scores.ids[:3] == -1).all() and not scores.top_logprobs[:3].any()


class Student:
    """A generator of the run, as Teachers see it: its most likely tokens are 0, 1, ...; now and then it fails."""

    def __init__(self, address: str, *, fails: bool = False):
        self.address, self.fails, self.asked, self.scores, self.free_at = address, fails, 0, 0, 0.0

    async def score(self, request: codec.ScoreRequest, *, seconds: float) -> codec.Scores | None:
        self.asked += 1
        if self.fails:
            return None
        rows = len(request.token_ids) - request.first
        ids = np.tile(np.arange(request.top_k, dtype=np.int32), (rows, 1))
        zeros = np.zeros(ids.shape, np.float32)
        return codec.Scores(zeros[:, 0], ids, zeros, zeros[:, :0])


def test_the_students_top_k_is_what_the_teacher_is_asked_for(liar, monkeypatch):
    monkeypatch.setattr(teachers_lib, "PAUSE_SECONDS", 0.01)
    students = [Student("a:1", fails=True), Student("b:2")]
    with asking(liar, form="student_topk", students=lambda: students) as ask:
        ((scores,),) = ask(row(0), completion(1))
        assert (scores.ids[3:] == np.arange(K)).all() and students[1].asked == 1
        wanted = codec.ScoreRequest(
            np.concatenate([row(0).token_ids, completion(1).token_ids]), 3, 0, np.tile(np.arange(K), (9, 1))
        )
        np.testing.assert_allclose(scores.top_logprobs[3:], SCRIPT.scores(wanted).target_logprobs, atol=1e-6)


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED])
def test_a_generator_that_cannot_score_is_rejected(liar, second, code):
    liar.score = lambda reply, _: (code, "not by me")
    with Trainer(config(distill_teachers={"tutor": "here"}), [liar], teachers=make(second, form="student_topk")) as run:
        with pytest.raises(FleetError, match=f"server {liar.address} cannot serve this run: {code.name}: not by me"):
            run.update()


def test_a_generator_that_fails_to_score_is_named_and_asked_again(liar, second, monkeypatch, caplog):
    monkeypatch.setattr(teachers_lib, "PAUSE_SECONDS", 0.01)
    fails = iter([(grpc.StatusCode.INTERNAL, "out of order")] * 2)
    liar.score = lambda reply, _: next(fails, reply)
    with Trainer(config(distill_teachers={"tutor": "here"}), [liar], teachers=make(second, form="student_topk")) as run:
        (group, *_) = run.update()
        assert group.teachers[0][0].ids.shape[1] == K
        line = f"server {liar.address}: fails to score (INTERNAL: out of order)"
        assert line in caplog.messages and run.states()[liar.address] == "active"


LIES: dict[str, tuple[str, Callable[[pb.ScoreReply], pb.ScoreReply]]] = {
    "shifted": ("differ from those that this teacher gave before by", lambda reply: shifted(reply, 0.1)),
    "NaN": ("not finite or above 0", lambda reply: change(reply, logprobs=np.full(len(reply.logprobs) // 4, np.nan))),
    "long": ("bytes of logprobs", lambda reply: change(reply, logprobs=[*codec.decode_floats(reply.logprobs), -1])),
    "two ways": (
        "differ from its own of the same tokens",
        lambda reply: change(reply, target_logprobs=codec.decode_floats(reply.target_logprobs) - 1),
    ),
    "updated": ("its weights have changed", lambda reply: reply.version.MergeFrom(pb.Version(step=4)) or reply),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_named_and_the_others_go_on(liar, second, caplog, lie):
    """It is honest at first: what it says is held against the teacher's at every call."""
    why, lies = LIES[lie]
    with asking(liar, second, form="topk_forward") as ask:
        ask(row(0), completion(0))
        eventually(lambda: ask.admitted() == 2)
        second.score = lambda reply, _: lies(reply)
        said = [completion(seed) for seed in range(1, 60)]
        for one, (scores,) in zip(said, ask(row(1), *said), strict=True):
            np.testing.assert_allclose(scores.logprobs, truth(row(1), one), atol=1e-6)
        (line,) = [record.getMessage() for record in caplog.records if second.address in record.getMessage()]
        assert line.startswith(f"teacher tutor, server {second.address}: ") and why in line
        assert ask.teachers.drain()["tutor"]["sent_away"] == 1 and ask.thread._failure is None


def test_a_server_that_scores_otherwise_than_it_samples_is_not_met(liar):
    """The first one of a teacher has nothing else to be held against. The run ends: no other can come."""
    liar.score = lambda reply, _: shifted(reply, 0.1)
    with asking(liar) as ask:
        assert "its log-probs differ from those that it samples with by 0.1" in ask.failure()


def test_a_vocabulary_beyond_all_numbers_does_not_end_the_run():
    assert teacher_server.vocabulary_of(f'{{"vocab_size": 1{"0" * 400}}}') == np.inf


def test_one_server_is_the_teacher_of_several_runs(liar):
    """Each lets it sample: a call with the id of an earlier one would end that."""
    with asking(liar) as one, asking(liar) as other:
        eventually(lambda: one.admitted() + other.admitted() == 2)
    assert len({request.group_id for request in liar.asked}) == len(liar.asked) == 2


def test_a_server_that_fails_is_left_to_the_others(liar, second, monkeypatch):
    monkeypatch.setattr(teacher_server, "PAUSE_SECONDS", 0.01)
    with asking(liar, second) as ask:
        ask(row(0), completion(0))
        second.score = lambda reply, _: (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        said = [completion(seed) for seed in range(1, 40)]
        for one, (scores,) in zip(said, ask(row(1), *said), strict=True):
            np.testing.assert_allclose(scores.logprobs, truth(row(1), one), atol=1e-6)
        assert ask.teachers.drain()["tutor"]["sent_away"] == 0 and ask.thread._failure is None


def test_a_server_that_answers_too_late_is_left_to_the_others(liar, second, monkeypatch, caplog):
    monkeypatch.setattr(teacher_server, "PAUSE_SECONDS", 0.01)
    with asking(liar, second, seconds=0.5) as ask:
        ask(row(0), completion(0))
        eventually(lambda: ask.admitted() == 2)
        second.score = lambda reply, _: asyncio.sleep(10 * SECONDS)
        said = [completion(seed) for seed in range(1, 40)]
        for one, (scores,) in zip(said, ask(row(1), *said), strict=True):
            np.testing.assert_allclose(scores.logprobs, truth(row(1), one), atol=1e-6)
        line = f"teacher tutor, server {second.address}: it scored no sequence in 0.5 s (config.distill.seconds); "
        assert any(message.startswith(line) for message in caplog.messages)
        assert ask.teachers.drain()["tutor"]["asked_again"] > 0 and ask.thread._failure is None


def test_a_server_that_is_gone_is_waited_for_and_another_one_found(caplog):
    listed: list[str] = []
    with asking(tutor=Where((), lambda: tuple(listed))) as ask, Liar() as later:
        with Liar() as first:
            listed.append(first.address)
            ask(row(0), completion(0))
        answer = ask.later(row(0), completion(1))
        eventually(lambda: any("teacher tutor: every server is lost" in r.getMessage() for r in caplog.records))
        listed[:] = [later.address]
        ((scores,),) = answer.result(SECONDS)
        np.testing.assert_allclose(scores.logprobs, truth(row(0), completion(1)), atol=1e-6)


def test_rows_choose_their_teacher(liar, second):
    with asking(one=Where((liar.address,)), two=Where((second.address,))) as ask:
        eventually(lambda: ask.admitted() == 2)
        for name in ("one", "two"):
            before = liar.calls["scored"], second.calls["scored"]
            ask(dataclasses.replace(row(0), extra={"tutor": name}), completion(1))
            asked = np.array([liar.calls["scored"], second.calls["scored"]]) > before
            assert asked.tolist() == [name == "one", name == "two"]
        assert ask(row(0), completion(2)) == [()]  # it names none


def test_the_groups_of_a_batch_have_their_teachers_scores(liar, second, monkeypatch):
    """And none those of an evaluation. A batch that waits for a teacher says so."""
    monkeypatch.setattr(teacher_server, "PAUSE_SECONDS", 0.01)
    statuses, asked = [], []
    teachers = make(second, observe=lambda status, from_here: statuses.append(status.server_id))
    with Trainer(config(distill_teachers={"tutor": "here"}), [liar], teachers=teachers) as trainer:
        eventually(lambda: second.calls["scored"])
        second.score = lambda reply, _: (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

        def wait() -> None:
            status = trainer.fleet.status()
            if status["waits_for"] == ["teacher tutor"]:
                assert ", with teacher tutor)" in status["waiting"]
                asked.append(second.calls["scored"])
                second.score = lambda reply, _: reply
            trainer.wait()

        for group in [*trainer.update(wait), *trainer.update()]:
            for one, scores in zip(group.completions, group.teachers, strict=True):
                np.testing.assert_allclose(scores[0].logprobs, truth(group.row, one), atol=1e-6)
        assert asked and set(statuses) == {second.service.server_id}
        groups = trainer.fleet.result(trainer.fleet.evaluate(2, [row(5)], 3), trainer.wait)
        assert [group.teachers for group in groups] == [None]
        # What a server delivered is taken back with what its teacher said of it.
        process = trainer.fleet.trust.working()[0]
        trainer.fleet.batch(2, trainer.wait)
        assert trainer.fleet.trust.dismiss(process, "it lies", [8]) == 4
        (again, *_) = trainer.update()
        assert again.number == 8 and len(again.teachers) == 4


def test_what_cannot_be_is_one_line_before_the_run(tmp_path):
    made = config(distill_column="tutor")
    made.distill.teachers = {"algebra": "a:1", "logic": "b:2"}
    rows = [dataclasses.replace(row(i), extra={"tutor": name}) for i, name in enumerate(["logic", "", "music"])]
    found = where_of(made, rows[:2], EXPECTED)
    assert found["algebra"].addresses == ("a:1",) and found["logic"].resolve is None
    with pytest.raises(
        ValueError, match=r"row 2: its tutor is 'music', and config\.distill\.teachers has algebra, logic"
    ):
        where_of(made, rows, EXPECTED)
    with pytest.raises(ValueError, match=r"config\.distill\.column=tutor: no row has it"):
        where_of(made, [row(0)], EXPECTED)
    made.distill.teachers["logic"] = "b"
    with pytest.raises(ValueError, match=r"config\.distill\.teachers\.logic=b: 'b' is not host:port"):
        where_of(made, rows[:2], EXPECTED)
    made.distill.teachers["logic"] = str(tmp_path / "away")
    with pytest.raises(ValueError, match=r"config\.distill\.teachers\.logic=.*away: no such folder"):
        where_of(made, rows[:2], EXPECTED)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    made.distill.teachers["logic"] = str(tmp_path)
    with pytest.raises(ValueError, match="its tokenizer is not the policy's"):
        where_of(made, rows[:2], EXPECTED)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokenizer_fingerprint": "other"}, "its tokenizer is not the policy's"),
        ({"model_config": '{"vocab_size": 63}'}, "its vocabulary has 63 ids, the policy's 64"),
        ({"maximum_top_k": 4}, "gives the log-probs of 4 ids at a token, and config.distill.k=5"),
        ({"maximum_top_k": 0}, "it has no ScoreMany"),
        ({"maximum_tokens": 255}, "holds 255 tokens of prompt and completion, the run needs up to 256"),
    ],
)
def test_a_server_that_is_none_of_a_teacher_is_refused(fields, why):
    good = {"tokenizer_fingerprint": "replay", "model_config": "{}", "maximum_top_k": 5, "maximum_tokens": 256}
    assert not teacher_server.fault_of(pb.StatusReply(**good), EXPECTED, top_k=K)
    assert why in teacher_server.fault_of(pb.StatusReply(**(good | fields)), EXPECTED, top_k=K)
