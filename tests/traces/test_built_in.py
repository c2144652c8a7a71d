"""The traces of the environments that make their own: the same as ever, and of a mixture by weight."""

import hashlib

import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import arithmetic
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.traces import built_in
from tests.support.chat_folders import chat_folder, two_stops


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tokenizer"))
    return make_tokenizer(corpus=built_in.corpus(Config()), path=path, vocabulary=384)


def chains(minimum, maximum, **fields):
    return EnvironmentConfig(minimum_terms=minimum, maximum_terms=maximum, **fields)


def texts(traces, updates, tokenizer):
    return [tokenizer.decode(example.tokens.tolist()) for update in updates for example in traces.batch(update)]


def terms_of(text):
    prompt = text.partition("=")[0]
    return 1 + prompt[1:].count("+") + prompt[1:].count("-")


def test_the_traces_of_a_config_stay_what_they_are(tokenizer):
    """A warm start that is made again gives the model that it gave."""
    found = texts(built_in.BuiltInTraces(Config(), tokenizer), (0, 1, 399), tokenizer)
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()
    assert digest == "bceaf1856300e2668fcb20e4238d6b12a7c457c9fdddaeb99ef00d7db18b4cea"
    corpus = hashlib.sha256("\n".join(built_in.corpus(Config())).encode()).hexdigest()
    assert corpus == "312f307be3eff804bd000808c9297b243d9ad938e30539bf6fc476ee50d3d5eb"


@pytest.mark.parametrize("control", ["interrupt", "penalty", "none"])
def test_interruptions_are_taught_where_the_run_interrupts(tokenizer, control):
    config = Config()
    config.rollout.length_control = control
    found = texts(built_in.BuiltInTraces(config, tokenizer), range(3), tokenizer)
    assert any(config.rollout.interruption_text in text for text in found) == (control == "interrupt")


def test_traces_end_as_the_chat_template_ends_a_turn(tmp_path):
    """Llama's base ends a text with another token, which stops a completion, too."""
    tokenizer = two_stops(tmp_path, "llama3")
    config = Config(environment=chains(2, 3, chat_template="always"))
    found = texts(built_in.BuiltInTraces(config, tokenizer), (0,), tokenizer)
    assert {text.endswith("<|eot_id|>") for text in found} == {True}
    stops = tmp_path / "generation_config.json"
    both = stops.read_text(encoding="utf-8")
    stops.write_text(f'{{"eos_token_id": {tokenizer.eos_id}}}', encoding="utf-8")
    (line,) = built_in.BuiltInTraces(config, Tokenizer(str(tmp_path))).notes
    assert "ends the assistant's turns with '<|eot_id|>'" in line
    stops.write_text(both, encoding="utf-8")
    config.environment.chat_template = "never"
    found = texts(traces := built_in.BuiltInTraces(config, tokenizer), (0,), tokenizer)
    assert {text.endswith("<|endoftext|>") for text in found} == {True} and not traces.notes


def test_a_mixture_gives_traces_by_weight(tokenizer):
    mixture = {"short": chains(2, 3, weight=3.0), "long": chains(6, 7), "asked": EnvironmentConfig(name="math")}
    found = texts(built_in.BuiltInTraces(Config(mixture=mixture), tokenizer), range(8), tokenizer)
    short = sum(terms_of(text) <= 3 for text in found) / len(found)
    assert {terms_of(text) for text in found} == {2, 3, 6, 7}
    assert len(found) > 500 and abs(short - 0.75) < 0.08
    corpora = [list(built_in.corpus(Config(environment=mixture[name]))) for name in ("short", "long")]
    assert list(built_in.corpus(Config(mixture=mixture))) == corpora[0] + corpora[1]


def test_arithmetic_and_programs_together(tmp_path):
    """A tokenizer of both, and traces of both."""
    programs = EnvironmentConfig(name="programs", minimum_terms=1, maximum_terms=2)
    config = Config(mixture={"sums": chains(2, 3), "code": programs})
    tokenizer = make_tokenizer(corpus=built_in.corpus(config), path=str(tmp_path), vocabulary=384)
    found = texts(built_in.BuiltInTraces(config, tokenizer), range(4), tokenizer)
    written = sum("print(x)" in text for text in found) / len(found)
    assert 0.4 < written < 0.6


def test_an_empty_range_is_named(tokenizer):
    with pytest.raises(
        ValueError, match=r"config\.mixture\.a\.minimum_terms=5: must not be above config\.mixture\.a\.max"
    ):
        built_in.BuiltInTraces(Config(mixture={"a": chains(5, 3)}), tokenizer)


def test_held_out_traces_are_of_held_out_problems(tokenizer):
    config = Config()
    config.sft.evaluation_traces = 20
    first, again = (built_in.BuiltInTraces(config, tokenizer).evaluation() for _ in range(2))
    prompts = [tokenizer.decode(e.tokens.tolist()).partition("=")[0] for e in first]
    assert [e.tokens.tolist() for e in first] == [e.tokens.tolist() for e in again] and len(prompts) == 20
    for prompt in prompts:
        terms = [int(t) for t in prompt.replace("-", "+-").split("+")]
        assert arithmetic.held_out(arithmetic.Problem(terms[0], tuple(terms[1:])))
    assert built_in.BuiltInTraces(Config(), tokenizer).evaluation() == []


def test_prompts_are_those_of_the_run(tmp_path):
    """Also where a chat template renders them, and opens the thinking that the trace would open."""
    tokenizer, config = chat_folder(tmp_path, "deepseek_r1"), Config(environment=chains(2, 3, chat_template="always"))
    config.sft.error_rate = 0.0
    for text in texts(built_in.BuiltInTraces(config, tokenizer), (0,), tokenizer):
        assert text.startswith("<｜begin▁of▁sentence｜><｜User｜>") and text.endswith("<｜end▁of▁sentence｜>")
        assert text.count("<think>") == 1 and "=<｜Assistant｜><think>\n" in text


def test_an_environment_without_traces_is_named(tokenizer):
    said = r"config\.sft\.traces: none are given, and math makes none of its own \(arithmetic"
    with pytest.raises(ValueError, match=said):
        built_in.BuiltInTraces(Config(environment=EnvironmentConfig(name="math")), tokenizer)
    with pytest.raises(ValueError, match=said):
        next(built_in.corpus(Config(mixture={"a": EnvironmentConfig(name="math")})))


def test_a_trace_that_does_not_fit_is_said(tokenizer):
    config = Config(environment=chains(12, 12))
    config.sft.seq_len = 16
    with pytest.raises(ValueError, match=r"config\.sft\.seq_len=16: a trace of arithmetic has \d+ tokens"):
        built_in.BuiltInTraces(config, tokenizer).batch(0)
