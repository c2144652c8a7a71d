"""The held-out split does not move."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.config import Config
from scalerl_jax.environments.base import RIGHT, Environment, Row, prompt_key
from scalerl_jax.environments.data.problems import Known, Problems

texts = st.lists(st.text(min_size=1).filter(str.strip), unique_by=lambda text: " ".join(text.split()), max_size=40)


@pytest.fixture(scope="module")
def chosen(tokenizer):
    """Of texts, those that are held out for an evaluation of `count` prompts."""

    def of(some, count):
        config = Config()
        config.evaluation.prompts = count
        config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0  # a text may end in </think>
        rows = [Row(text) for text in some]
        problems, known = Problems(config, tokenizer), Known()
        environment = Environment(lambda split: rows if split == "train" else (), lambda row, completion: RIGHT)
        problems.read_held_out(environment, known)
        problems.read_train(environment, known)
        return [row.text for row in problems.held_out(known)]

    return of


@given(texts, st.integers(0, 50), st.randoms())
def test_the_choice_is_of_exactly_that_many_and_does_not_depend_on_the_order(chosen, some, count, random):
    found = chosen(some, count)
    assert len(found) == min(count, len(some)) == len(set(found))
    other = list(some)
    random.shuffle(other)
    assert chosen(other, count) == found


@given(texts, st.integers(0, 50), st.integers(0, 40))
def test_growing_data_change_it_by_what_is_new_and_lower_alone(chosen, some, count, cut):
    before, after = chosen(some[:cut], count), chosen(some, count)
    new = set(some[cut:])
    kept = [text for text in after if text not in new]
    assert kept == before[: len(kept)]  # what goes are the highest, one for each new one that is lower
    if len(before) == count:
        assert len(kept) == count - len(new & set(after))


@given(texts)
def test_the_lowest_are_the_lowest(chosen, some):
    reference = sorted(some, key=lambda t: hashlib.blake2b(" ".join(t.split()).encode(), digest_size=16).hexdigest())
    assert chosen(some, 7) == reference[:7]


def test_white_space_is_no_difference_and_anything_else_is():
    assert prompt_key("a  b\n") == prompt_key(" a b") != prompt_key("ab") != prompt_key("a B")
