"""The flags of the commands that have a workdir or a page. No heavy imports: --help and a wrong flag are answered
before jax is imported.

Each function may be called more than once. The flags of the config are not absl's: config_io.py reads them.
"""

from absl import flags

FLAGS = flags.FLAGS
_SERVERS = "Rollout servers, as host:port,..., file:PATH or dns:///name:port. Empty: local ones are started."
_WITH_PARENT = "Save and exit at the end of standard input, with the parent process."
_ALLOW = "Config fields, NAME,..., that may have other values than before although that changes what is learned."


def train() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string("workdir", None, "Folder of the run. A run found there is continued.", required=True)
        flags.DEFINE_string("servers", "", _SERVERS)
        flags.DEFINE_list("allow", [], _ALLOW)
        flags.DEFINE_integer(
            "metrics_port", None, "Port that serves the metrics to Prometheus over HTTP; 0 takes any free one. Not "
            "given: none is served.", 0, 65535,
        )  # fmt: skip
        flags.DEFINE_string(
            "metrics_host", "127.0.0.1", "Address that --metrics_port listens on. Every client that reaches it may "
            "read the metrics.",
        )  # fmt: skip
        flags.DEFINE_enum(
            "hosts", "auto", ["auto", "one", "given", "jobset", "lws", "slurm", "tpu"], "How this process learns which "
            "host of the trainer it is: from the variables of a Kubernetes JobSet or LeaderWorkerSet, of Slurm, or of "
            "a TPU; given: from the next three flags; auto: from what the environment has.",
        )  # fmt: skip
        flags.DEFINE_string("coordinator", "", "host:port at which the first host listens for the others.")
        flags.DEFINE_integer("host_count", 0, "Number of hosts of the trainer; 0: not given.", lower_bound=0)
        flags.DEFINE_integer("host_index", -1, "Number of this host, from 0; -1: not given.", lower_bound=-1)
        flags.DEFINE_string(
            "maintenance", "", "Where the end of this host is announced, gce or file:PATH. The run then saves and "
            "exits.",
        )  # fmt: skip
        flags.DEFINE_integer(
            "from_step", None, "Go back to the checkpoint of this step (0: to the start) and exit. Newer checkpoints "
            "are set aside, and the next start continues from this one.", lower_bound=0,
        )  # fmt: skip
        flags.DEFINE_bool("exit_with_parent", False, _WITH_PARENT)


def sft() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string(
            "workdir", None, "Folder of the warm start; the model will be WORKDIR/model.", required=True
        )
        flags.DEFINE_list("allow", [], _ALLOW)
        flags.DEFINE_bool("exit_with_parent", False, _WITH_PARENT)


def evaluate() -> None:
    if "steps" not in FLAGS:
        flags.DEFINE_string("model", "", "Hugging Face folder of the policy to evaluate.")
        flags.DEFINE_string("workdir", "", "Folder of a run, in place of --model: its checkpoints are evaluated.")
        flags.DEFINE_string(
            "steps", "all", "Which checkpoints of --workdir: steps with commas between, last, or all that are kept. 0 "
            "is the start.",
        )  # fmt: skip
        flags.DEFINE_list(
            "environment", [], "What to evaluate on: arithmetic, gsm8k, math:FILE, code:FILE, FILE.py:CLASS, "
            "reasoning_gym:NAME, ... Empty: the held-out prompts of the config.",
        )  # fmt: skip
        flags.DEFINE_integer("samples", 0, "Completions of each prompt; 0: as the config says.", lower_bound=0)
        flags.DEFINE_integer(
            "prompts", 0, "At most so many prompts of each environment; 0: as the config says.", lower_bound=0
        )
        flags.DEFINE_string("servers", "", _SERVERS)
        flags.DEFINE_bool("take", False, "Take servers away, for good, from the trainer whose weights they hold.")
        flags.DEFINE_string(
            "out", "", "Folder of the results; an evaluation found there is continued. Default: evaluations/ in the "
            "workdir, or evaluations/MODEL here.",
        )  # fmt: skip


def export() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
        flags.DEFINE_string("out", None, "Folder to write. It must not exist.", required=True)
        flags.DEFINE_enum(
            "dtype", "", ["", "float32", "bfloat16"], "Dtype of the weights; default: the one that generators hold."
        )
        flags.DEFINE_string("model", "", "Folder of the model that the run started from, if it has moved.")
        flags.DEFINE_bool(
            "adapter", False, "Write the adapter of a run with config.lora in PEFT's form, instead of the merged "
            "policy.",
        )  # fmt: skip
        flags.DEFINE_bool("merge", False, "Write the merged policy of a run with config.lora, as without --adapter.")


def watch() -> None:
    """The flags with which scalerl-fit watches its files, besides those of fit_flags.py."""
    if "watch" not in FLAGS:
        flags.DEFINE_bool("watch", False, "Draw again after each evaluation, until the run has ended.")
        flags.DEFINE_float(
            "watch_every", 5.0, "Seconds between two reads of the files.", lower_bound=0.1, upper_bound=3600.0
        )


def verify() -> None:
    if "show" not in FLAGS:
        flags.DEFINE_string("environment", "", "Short for --config.environment.name; math if neither is given.")
        flags.DEFINE_enum(
            "thinking", "", ["", "auto", "always", "never"], "Where the answer is. always: behind the end of thinking, "
            "as in a run with a thinking budget; never: it is the whole completion; auto: always if a completion shows "
            "thinking, else never. Default: as --config has it, auto without one.",
        )  # fmt: skip
        flags.DEFINE_integer("show", 20, "Rows in the table; 0: all.", lower_bound=0)
        flags.DEFINE_integer(
            "prompts", 0, "Show so many training and held-out prompts as a run would ask them, and judge nothing.",
            lower_bound=0,
        )  # fmt: skip
        flags.DEFINE_string("out", None, "JSONL file to write: every row with its score.")


def report() -> None:
    if "out" not in FLAGS:
        flags.DEFINE_string(
            "out", None, "File or folder of the page. Default: the folder of the run, if there is one run."
        )


def _http() -> None:
    """Flags of an HTTP server in front of rollout servers."""
    if "port_file" not in FLAGS:
        flags.DEFINE_string(
            "model", None, "Hugging Face folder of the model to sample from, or a run's folder.", required=True
        )
        flags.DEFINE_string(
            "servers", "", "Rollout servers, as host:port,..., file:PATH or dns:///name:port, which "
            "scalerl-gateway lists again while it serves. Empty: local ones are started.",
        )  # fmt: skip
        flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
        flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free one.", 0, 65535)
        flags.DEFINE_string("port_file", "", "File that the port is written to, in decimal, once the server answers.")
        flags.DEFINE_list(
            "names", [], "Names by which clients may ask for the model; the first is shown, * allows any. Default: the "
            "folder's name.",
        )  # fmt: skip
        flags.DEFINE_integer(
            "maximum_tokens", 4096, "Longest prompt and completion together, of local servers.", lower_bound=2
        )
        flags.DEFINE_float("request_seconds", 600.0, "Seconds in which a completion must be sampled.", lower_bound=0.1)
        flags.DEFINE_string("token_file", "", "File with the key that every call must carry. Empty: any key will do.")
        flags.DEFINE_string("tls_certificate", "", "PEM file of the server's certificate. Empty: no TLS.")
        flags.DEFINE_string("tls_key", "", "PEM file of its private key.")
        flags.DEFINE_bool("insecure", False, "Listen beyond this machine without TLS and a token.")
        flags.DEFINE_bool("exit_with_parent", False, "Exit at the end of standard input, with the parent process.")


def gateway() -> None:
    _http()
    if "journal" not in FLAGS:
        flags.DEFINE_string("journal", "", "Folder of the sessions' journals. Empty: sessions are in memory alone.")
        flags.DEFINE_integer("sessions", 1024, "Most sessions open at a time.", lower_bound=1)
        flags.DEFINE_integer("turns", 10_000, "Most turns of a session.", lower_bound=1)
        flags.DEFINE_integer(
            "session_bytes", 2**30, "Most bytes of memory for all sessions; beyond them no session begins.",
            lower_bound=1,
        )  # fmt: skip


def tinker() -> None:
    _http()
    if "workdir" not in FLAGS:
        flags.DEFINE_string(
            "workdir", None, "Folder of all training runs, checkpoints and calls. The same command continues from it.",
            required=True,
        )  # fmt: skip
