"""--help of every command that is started by its name, and flags that cannot be."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "name", "flag"),
    [
        ("rollout_server.serve", "scalerl-serve", "--slots"),
        ("scalerl_jax.train", "scalerl-train", "--workdir"),
        ("scalerl_jax.fit", "scalerl-fit", "--burn_in"),
    ],
)
def test_help_says_what_the_command_is_and_lists_its_flags(module, name, flag):
    start = f"import sys; sys.argv[0] = '/bin/{name}'; from {module} import run; run()"
    done = subprocess.run([sys.executable, "-c", start, "--help"], capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert text.strip().startswith(f"{name}: ")
    assert f"\n  {flag}: " in text
    assert "--only_check_args" not in text  # absl's own stay under --helpfull


@pytest.mark.parametrize(("flag", "said"), [("--bootstrp=3", "bootstrp"), ("--bootstrap=many", "bootstrap")])
def test_a_flag_that_cannot_be_is_one_line(flag, said):
    start = "import sys; sys.argv[0] = 'scalerl-fit'; from scalerl_jax.fit import run; run()"
    done = subprocess.run([sys.executable, "-c", start, flag], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
