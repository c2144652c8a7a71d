import pytest

from scalerl_jax.rollouts.addresses import parse


def test_all_forms(tmp_path):
    assert parse("a:1, b.example:65535,[::1]:7") == ["a:1", "b.example:65535", "[::1]:7"]
    path = tmp_path / "servers"
    path.write_text("a:1  # the first\n\n# none\nb:2\n")
    assert parse(f"file:{path}") == ["a:1", "b:2"]
    assert set(parse("dns:///localhost:70")) <= {"127.0.0.1:70", "[::1]:70"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no server"),
        ("a", "'a' is not host:port"),
        ("a:1,b:x", "'b:x' is not host:port"),
        ("a:0", "'a:0' is not host:port"),
        ("file:/nowhere/at/all", "--servers=file:/nowhere/at/all: no such file"),
        ("dns:///no-such-name.invalid:1", "--servers=dns:///no-such-name.invalid:1"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
