import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of arithmetic's traces."""
    from scalerl_jax.traces import built_in  # it imports jax, which the adapters' environment lacks

    path = str(tmp_path_factory.mktemp("tokenizer"))
    return make_tokenizer(corpus=built_in.corpus(Config()), path=path, vocabulary=384)
