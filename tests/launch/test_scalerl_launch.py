"""scalerl-launch itself: its folder, its mistakes, what it runs; and the machines it knows."""

import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import machines
from launch.settings import maximum_tokens
from scalerl_jax.config import Config
from scalerl_jax.rollouts.requests import Requests
from tests.launch.launched import KUBERNETES, SLURM, launch


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*KUBERNETES, "--trainer=v5p:4x4"), "--trainer=v5p:4x4: a v5p slice is written like v5p:4x4x4"),
        ((*KUBERNETES, "--trainer=v9:4x4"), "--trainer=v9:4x4: 'v9' is not one of v5e, v5p, v6e, "),
        (
            (*KUBERNETES, "--trainer=h100:32"),
            "32 GPUs on one node: two nodes of 8 are written h100:2x8",
        ),
        ((*KUBERNETES, "--generator=h100:2x8"), "--generator=h100:2x8: the devices of an engine are on one host"),
        ((*KUBERNETES, "--trainer="), "--trainer: not given"),
        ((*KUBERNETES, "--trainer_image="), "--trainer_image: no image given"),
        ((*KUBERNETES, "--name=Eight_B"), "--name=Eight_B: a name begins with a letter"),
        ((*KUBERNETES, "--partition=gpu"), "--partition: requires --target=slurm"),
        ((*SLURM, "--namespace=x"), "--namespace: requires --target=kubernetes"),
        ((*SLURM, "--trainer=v5e:4x4"), "--trainer=v5e:4x4: TPUs are in Kubernetes clusters"),
        ((*SLURM, "--generator_memory=128 GB"), "--generator_memory=128 GB: is not written like 512G"),
        ((*SLURM, "--trainer_sbatch=qos=long"), "--trainer_sbatch=qos=long: is no option of sbatch, written like"),
        ((*SLURM, "--generator_sbatch=--mem=1G"), "--generator_sbatch=--mem=1G: --mem goes by --generator_memory"),
        ((*SLURM, "--trainer_sbatch=--signal=KILL"), "--trainer_sbatch=--signal=KILL: --signal is the script's own"),
        ((*KUBERNETES, "--trainer_sbatch=--qos=x"), "--trainer_sbatch: requires --target=slurm"),
        ((*SLURM, "--noinsecure"), "--token_file: not given; without TLS and a token"),
        ((*SLURM, "--workdir=my runs/one"), "my runs/one: sbatch writes no log where there are blanks, quotes or %"),
        (
            (*SLURM, "--engine=vllm", "--config.numerics=bitwise"),
            "--engine=vllm: config.numerics=bitwise is computed by jax alone",
        ),
        ((*SLURM, "--token_file=/no/such"), "--token_file=/no/such: no such file"),
        ((*KUBERNETES, "--slices=2"), "--slices=2: requires a --trainer that is a TPU slice"),
        ((*KUBERNETES, "--autoscale=keda"), "--maximum_generators=0: with --autoscale=keda it must be above"),
        ((*KUBERNETES, "--busy_target=0.5"), "--busy_target: requires --autoscale"),
        ((*KUBERNETES, "--autoscale=keda", "--maximum_generators=2", "--busy_target=0.95"), "busy_target"),
        (
            (*KUBERNETES, "--autoscale=hpa", "--generators=64", "--maximum_generators=96"),
            "--generators=64: the run has at most ",
        ),
        ((*KUBERNETES, "--part=trainer"), "--generator: does not go with --part=trainer"),
        ((*KUBERNETES, "--part=trainer", "--generator=", "--generators=4"), "--generators: does not go with --part="),
        ((*SLURM, "--part=generators", "--trainer=", "--trainer_cpus=8"), "--trainer_cpus: does not go with --part="),
        ((*KUBERNETES, "--prometheus=http://here"), "--prometheus: requires --autoscale=keda"),
        ((*KUBERNETES, "--runs_claim=nfs", "--storage_size=2Ti"), "--storage_size=2Ti: --runs_claim=nfs is there"),
        ((*KUBERNETES, "--storage_size=1 TB"), "--storage_size: '1 TB' is no quantity, such as 8 or 200Gi"),
        ((*KUBERNETES, "--trainer_resources=cpu=8,memory=64GB"), "--trainer_resources: '64GB' is no quantity"),
        ((*KUBERNETES, "--generator=h100:2", "--engine=jax"), "--generator=h100:2: the jax engine computes on one"),
        ((*SLURM, "--time=2 days"), "--time=2 days: is not written like 24:00:00"),
        ((*SLURM, "--account=our team"), "--account=our team: no such name"),
        ((*KUBERNETES, "--servers=a:1"), "--servers=a:1: requires --part=trainer"),
        ((*KUBERNETES, "--workdir=/scratch/run"), "--workdir=/scratch/run: is not under /runs"),
        ((*KUBERNETES, "--issuer=company"), "--issuer=company: is not Issuer/NAME"),
        ((*KUBERNETES, "--trainer_env=A"), "--trainer_env=A: 'A' is not NAME=VALUE"),
        ((*KUBERNETES, "--config.rollout.top_q=1"), "config.rollout"),
        ((*KUBERNETES, "--config=no.py"), "--config=no.py: no such file"),
        (("--target=kubernetes", "--trainer=cpu"), "--config: no config file given"),
        ((*KUBERNETES, "--grace_seconds=1"), "grace_seconds"),
        ((*KUBERNETES, "--config.model.path="), "config.model.path: not given"),
        (
            (*SLURM, "--config.objective.distill=sampled", '--config.distill.teachers={"one": "models/one"}'),
            "config.distill.teachers.one=models/one: is a folder, and a launched run takes servers",
        ),
    ],
)
def test_a_mistake_is_one_line_and_no_file(flags: tuple[str, ...], said: str, tmp_path: pathlib.Path) -> None:
    result = launch(*flags, "--dry_run", where=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_anew_and_nobody_elses_is_touched(tmp_path: pathlib.Path) -> None:
    first = launch(*KUBERNETES, "--dry_run", where=tmp_path)
    assert first.returncode == 0, first.stderr
    made = tmp_path / "tiny-kubernetes"
    assert f"to apply them: bash {made.name}/apply.sh" in first.stdout
    again = launch(*KUBERNETES, "--insecure", "--dry_run", where=tmp_path)
    assert again.returncode == 0, again.stderr
    assert not (made / "tls.yaml").exists()
    listed = re.findall(r"^tiny-kubernetes/(\S+)  ", again.stdout, flags=re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in made.iterdir() if p.suffix)

    (made / "mine.yaml").write_text("a: b\n")
    refused = launch(*KUBERNETES, "--dry_run", where=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "tiny-kubernetes has mine.yaml in it" in refused.stderr
    assert (made / "mine.yaml").exists()

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    refused = launch(*KUBERNETES, "--dry_run", "--out=other", where=tmp_path)
    assert refused.returncode == 2
    assert "other is a folder with other files in it" in refused.stderr
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("flags", "program"), [(KUBERNETES, "kubectl"), (SLURM, "sbatch")])
def test_without_the_program_nothing_is_written(flags: tuple[str, ...], program: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "bin").mkdir()
    result = launch(*flags, where=tmp_path, variables={"PATH": str(tmp_path / "bin")})
    assert result.returncode == 2
    assert f"no {program} is here" in result.stderr and "--dry_run" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize("code", [0, 1])
def test_the_program_is_run_and_its_failure_told(code: int, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/usr/bin/env bash\necho "kubectl $*"\n[[ "$*" == *"apply"* ]] && exit {code}\nexit 0\n')
    program.chmod(0o755)
    result = launch(*KUBERNETES, where=tmp_path, variables={"PATH": f"{program.parent}:/usr/bin:/bin"})
    assert "kubectl apply --filename=storage.yaml" in result.stdout
    assert ("kubectl apply --filename=trainer.yaml" in result.stdout) == (code == 0)
    assert result.returncode == 2 * code
    if code:
        assert "apply.sh ended with code 1, see above" in result.stderr


# --------------------------------------------------------------------------------------------------- the machines


@pytest.mark.parametrize(
    ("text", "hosts", "devices"),
    [
        ("v5p:4x4x4", 16, 4), ("v5p:2x2x1", 1, 4), ("v5p:2x2x2", 2, 4), ("v5e:1x1", 1, 1), ("v5e:2x4", 1, 8),
        ("v5e:16x16", 64, 4), ("v6e:4x4", 4, 4), ("h200:8", 1, 8), ("h200:2x8", 2, 8), ("h100", 1, 1), ("cpu", 1, 0),
        ("cpu:3", 3, 0),
    ],
)  # fmt: skip
def test_machines(text: str, hosts: int, devices: int) -> None:
    machine = machines.parse(text)
    assert (machine.hosts, machine.devices_of_host) == (hosts, devices)


@pytest.mark.parametrize("text", ["", "v5p", "v5p:0x4x4", "v5e:3x1", "v5e:4x", "h100:x8", "h100:0", "cpu:0", "cpu:-1"])
def test_no_such_machine(text: str) -> None:
    with pytest.raises(ValueError):
        machines.parse(text)


class ByteTokens:
    """No tokenizer makes more tokens of a text than this one."""

    stop_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@given(
    thinking=st.integers(0, 20_000), answer=st.integers(1, 4096), prompt=st.integers(1, 4096),
    control=st.sampled_from(["interrupt", "penalty", "none"]), text=st.text(max_size=30),
)  # fmt: skip
def test_servers_hold_what_is_wanted(thinking: int, answer: int, prompt: int, control: str, text: str) -> None:
    config = Config()
    rollout = config.rollout
    rollout.thinking_budget_max, rollout.thinking_budget_min = thinking, min(1, thinking)
    rollout.answer_budget, rollout.max_prompt_tokens, rollout.length_control = answer, prompt, control  # type: ignore[assignment]
    rollout.interruption_text = text + rollout.end_of_thinking
    config.learner.seq_len, config.model.path = 2**20, "policy"
    wanted = prompt + Requests(config, ByteTokens()).maximum_tokens
    assert maximum_tokens(config) == wanted
    config.learner.seq_len = 100
    assert maximum_tokens(config) == min(wanted, 101)
