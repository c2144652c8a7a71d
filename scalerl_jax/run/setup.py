"""What a run starts from, loaded and checked before anything is started: policy, tokenizer, prompts, given servers.

A user's mistake in them is a ValueError, one line. Nothing here computes on a device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from scalerl_jax.config import Config
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments.base import Rows
from scalerl_jax.environments.curriculum import Curriculum
from scalerl_jax.environments.load import digest
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner.make_trainer import lora_of
from scalerl_jax.model.decoder_config import DecoderConfig, check_folder, read_config
from scalerl_jax.model.lora import read_adapter
from scalerl_jax.model.safetensors_folder import Tensors
from scalerl_jax.rollouts import teachers as teachers_lib
from scalerl_jax.rollouts import trust
from scalerl_jax.rollouts.parity import LIMITS_WITH_EXPERTS
from scalerl_jax.rollouts.requests import Requests, Routed
from scalerl_jax.rollouts.servers import teacher_server
from scalerl_jax.rollouts.servers.discovery import ListedServers, Servers
from scalerl_jax.rollouts.servers.validate_status import Expected, ProbeError, compare
from scalerl_jax.run import continuing, inputs
from scalerl_jax.run.folder import RunFolder

LOW_RATE = 2e-6  # a lower one is remarked on with an adapter; training all parameters takes 5e-7


def given_servers(config: Config, text: str) -> ListedServers:
    """text: the value of --servers; if it is empty, local ones are started."""
    listed = ListedServers.of(text, config.fleet)
    if not text and listed.credentials.authority:
        raise ValueError("config.fleet.tls_authority: requires --servers; local ones are reached without TLS")
    return listed


def expected_of(config: Config, decoder: DecoderConfig | None, *, maximum_tokens: int) -> Expected:
    """The properties that every server must have. decoder: None for a family that only its engine knows."""
    return Expected(
        tokenizer_fingerprint=tokenizer_fingerprint(config.model.path),
        model_config=decoder.canonical_json() if decoder is not None else "",
        head_precision=config.model.head_precision,
        sync_dtype=config.model.sync_dtype,
        maximum_tokens=maximum_tokens,
        router_replay=config.rollout.router_replay,
        experts=decoder is not None and decoder.experts > 0,
        numerics=config.numerics,
        top_k=config.distill.k if config.objective.distill == "student_topk" else 0,
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    decoder: DecoderConfig
    tokenizer: Tokenizer
    rows: Rows
    requests: Requests
    curriculum: Curriculum
    servers: ListedServers
    maximum_tokens: int  # of the longest prompt and its longest completion
    expected: Expected
    teachers: dict[str, teachers_lib.Where]  # by name
    remarks: list[str]  # lines for the user

    def check(self, server: str, status: pb.StatusReply) -> None:
        """Raises ProbeError if the server does not fit this run."""
        compare(server, status, self.expected)

    def check_servers(self, config: Config, *, seconds: float) -> dict[str, str]:
        """Checks the given servers once, the teachers' too; returns the folders of teachers that local servers are to
        serve. Raises FleetError if none of them can ever be used. seconds: limit for a status."""
        given = self.servers
        if given.addresses:
            trust.check_servers(given.addresses, given.credentials, self.check, seconds=seconds)
        for name, where in self.teachers.items():

            def check(server: str, status: pb.StatusReply, name: str = name) -> None:
                if fault := teacher_server.fault_of(status, self.expected, top_k=teachers_lib.top_k_of(config)):
                    raise ProbeError(f"teacher {name}, server {server}: {fault}")

            if where.addresses:
                trust.check_servers(where.addresses, where.credentials, check, seconds=seconds)
        return {name: where.folder for name, where in self.teachers.items() if where.folder}

    def teachers_at(
        self, config: Config, local: Mapping[str, Sequence[str]], *, observe: Callable[[pb.StatusReply, bool], None]
    ) -> teachers_lib.Teachers:
        """The teachers, for the fleet. local: the addresses of those that local servers serve. observe: see
        Teachers."""
        where = dict(self.teachers)
        for name, addresses in local.items():
            where[name] = teachers_lib.Where(tuple(addresses), credentials=self.servers.credentials)
        prompt = self.rows.train[0].token_ids
        return teachers_lib.Teachers(
            config, where, prompt=prompt, expected=self.expected, limits=LIMITS_WITH_EXPERTS, observe=observe
        )

    def servers_at(self, addresses: Sequence[str]) -> Servers:
        """The servers, for the fleet: the credentials they are shown, and the checks they must pass."""
        decoder, given = self.decoder, self.servers
        routed = Routed(decoder.layers, decoder.experts_per_token, decoder.experts) if decoder.experts else None
        return Servers(
            addresses,
            probe_prompts=self.rows.train,
            resolve=given.resolve,
            credentials=given.credentials,
            vocabulary=decoder.vocab_size,
            routed=routed,
            check=self.check,
        )


def load(config: Config, servers: str) -> Setup:
    """servers: the value of --servers."""
    check_folder("config.model.path", config.model.path)
    decoder = read_config(config.model.path)
    Tensors(config.model.path, decoder)  # a folder without weights is found before anything is started
    tokenizer = Tokenizer(config.model.path)
    tokenizer.check_vocabulary(decoder.vocab_size)
    rows = inputs.all_rows(config, tokenizer)
    requests = Requests(config, tokenizer)
    given = given_servers(config, servers)
    remarks = [*rows.notes, *remarks_on(config, rows)]
    maximum_tokens = config.rollout.max_prompt_tokens + requests.maximum_tokens
    inputs.check_length(config, maximum_tokens, decoder)
    if maximum_tokens > config.learner.seq_len + 1:
        raise ValueError(
            f"config.learner.seq_len={config.learner.seq_len}: a prompt and its completion may have "
            f"{maximum_tokens} tokens (longest prompt, thinking and answer budgets, interruption phrase)"
        )
    if (lora := lora_of(config, decoder)) is not None:
        if lora.folder:  # raises if it is unusable
            read_adapter(lora.folder, lora)
        if config.optimizer.learning_rate < LOW_RATE:
            remarks.append(
                f"config.optimizer.learning_rate={config.optimizer.learning_rate:g}: an adapter (config.lora) wants "
                "about ten times the rate of training all parameters"
            )
    curriculum = Curriculum(
        rows.strata,
        config.curriculum,
        k=config.pacing.max_off_policy_steps,
        groups_per_batch=config.rollout.prompts_per_step,
        seed=config.seed,
        digest=digest(rows.train),
    )
    expected = expected_of(config, decoder, maximum_tokens=maximum_tokens)
    teachers = teachers_lib.where_of(config, rows.train, expected)
    return Setup(decoder, tokenizer, rows, requests, curriculum, given, maximum_tokens, expected, teachers, remarks)


def remarks_on(config: Config, rows: Rows) -> list[str]:
    """Lines on having fewer prompts than the config asks for. Raises ValueError if none is held out."""
    lines = []
    for name in config.mixture or [""]:
        held_out = sum(row.environment == name for row in rows.held_out)
        of = f" of {name}" if name else ""
        if not held_out:
            raise ValueError(
                f"config.evaluation.prompts: there is no held-out prompt{of}, and so nothing to evaluate on"
            )
        if held_out < config.evaluation.prompts:
            asked = f"config.evaluation.prompts={config.evaluation.prompts}"
            lines.append(f"{asked}: there are {held_out} held-out prompts{of}, and all of them are used")
    if len(rows.train) < config.rollout.prompts_per_step:
        asked = f"config.rollout.prompts_per_step={config.rollout.prompts_per_step}"
        lines.append(
            f"{asked}: there are {len(rows.train)} training prompts, so a batch has some of them more than once"
        )
    return lines


def remarks_on_changes(folder: RunFolder, now: dict[str, str], *, step: int, fresh: bool) -> list[str]:
    """A line for each input and each config field that has changed since `step`; the digests `now` are saved for the
    next start. fresh: the run begins."""
    of_inputs = [
        f"{name} changed since step {step}" for name in inputs.changed(folder.path(inputs.FILE), now, first=fresh)
    ]
    of_config = [
        f"from step {step} on config.{change.name} is {change.now!r}; before: {change.before!r}"
        for change in folder.changes
        if change.kind != continuing.FREE
    ]
    return of_inputs + of_config
