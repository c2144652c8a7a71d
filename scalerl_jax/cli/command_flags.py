"""The flags of the commands that have a workdir or a page, apart from what reads them: --help and a wrong flag are
answered before jax is imported.

Each function may be called more than once. The flags of the config are not absl's: config_io.py reads them.
"""

from absl import flags

FLAGS = flags.FLAGS
_WITH_PARENT = "Save and leave at the end of standard input, with the parent process."
_ALLOW = "Config fields (name,...) to go on with other values of, though that changes what is learned."


def train() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string("workdir", None, "Folder of the run; a run found there goes on.", required=True)
        flags.DEFINE_string(
            "servers", "", "host:port,..., file:PATH or dns:///name:port; none: local ones are started."
        )
        flags.DEFINE_list("allow", [], _ALLOW)
        flags.DEFINE_integer(
            "metrics_port", None, "Port of the metrics for Prometheus, over HTTP; 0: any free one. Default: there are "
            "none.", 0, 65535,
        )  # fmt: skip
        flags.DEFINE_string(
            "metrics_host", "127.0.0.1",
            "With --metrics_port: address to listen on; every client that reaches it may read the metrics.",
        )  # fmt: skip
        flags.DEFINE_enum(
            "hosts", "auto", ["auto", "one", "given", "jobset", "lws", "slurm", "tpu"],
            "How this process finds out which host of the trainer it is: from a Kubernetes JobSet or LeaderWorkerSet, "
            "Slurm, a TPU's environment or metadata; given: by the three flags below; auto: by what is there.",
        )  # fmt: skip
        flags.DEFINE_string("coordinator", "", "host:port at which the first host listens for the others.")
        flags.DEFINE_integer("host_count", 0, "Hosts of the trainer; 0: not given.", lower_bound=0)
        flags.DEFINE_integer("host_index", -1, "Of this one, from 0; -1: not given.", lower_bound=-1)
        flags.DEFINE_string(
            "maintenance",
            "",
            "Where the end of this host is announced: gce or file:PATH; then the run saves and leaves.",
        )
        flags.DEFINE_integer(
            "from_step",
            None,
            "Goes back to the checkpoint of this step (0: to the start) and ends. Newer ones are set aside; the next "
            "start goes on from there.",
            lower_bound=0,
        )
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
        flags.DEFINE_string("workdir", "", "Folder of a run, in the place of --model: its checkpoints are evaluated.")
        flags.DEFINE_string(
            "steps",
            "all",
            "Of --workdir: steps with commas between, last, or all checkpoints that are kept; 0: its start.",
        )
        flags.DEFINE_list(
            "environment", [], "What to evaluate on: arithmetic, gsm8k, math:FILE, code:FILE, FILE.py:CLASS, "
            "reasoning_gym:NAME, ...; none: the held-out prompts of the config."
        )  # fmt: skip
        flags.DEFINE_integer("samples", 0, "Completions of a prompt; 0: as the config says.", lower_bound=0)
        flags.DEFINE_integer("prompts", 0, "Of each environment, at most; 0: as the config says.", lower_bound=0)
        flags.DEFINE_string(
            "servers", "", "host:port,..., file:PATH or dns:///name:port; none: local ones are started."
        )
        flags.DEFINE_bool("take", False, "Servers that hold the weights of a trainer are taken from it, for good.")
        flags.DEFINE_string("out", "", "Folder of what is found; an evaluation found there goes on. "
                            "Default: evaluations/ in the workdir, or evaluations/MODEL here.")  # fmt: skip


def export() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
        flags.DEFINE_string("out", None, "Folder to make; must not exist.", required=True)
        flags.DEFINE_enum(
            "dtype", "", ["", "float32", "bfloat16"], "Of the weights; default: what the generators hold."
        )
        flags.DEFINE_string("model", "", "Folder of the model the run started from, where it has moved.")
        flags.DEFINE_bool("adapter", False, "Writes the adapter of a run with config.lora as PEFT has it, not merged.")


def verify() -> None:
    if "show" not in FLAGS:
        flags.DEFINE_string("environment", "", "Short for --config.environment.name; without either it is math.")
        flags.DEFINE_enum(
            "thinking", "", ["", "auto", "always", "never"],
            "always: the answer follows the end of thinking, as in a run with a thinking budget; never: it is all of "
            "the completion; auto: always where a completion shows thinking, else never. Default: as --config has it, "
            "auto without one.",
        )  # fmt: skip
        flags.DEFINE_integer("show", 20, "Rows in the table; 0: all.", lower_bound=0)
        flags.DEFINE_integer(
            "prompts", 0, "So many training and held-out prompts are shown as a run would ask them; nothing is judged.",
            lower_bound=0,
        )  # fmt: skip
        flags.DEFINE_string("out", None, "JSONL file to write: every row with its score.")


def report() -> None:
    if "out" not in FLAGS:
        flags.DEFINE_string("out", None, "File (or folder) of the page; one run's own folder where it is left out.")


def _http() -> None:
    """Of a server of HTTP before rollout servers."""
    if "port_file" not in FLAGS:
        flags.DEFINE_string("model", None, "Hugging Face folder of what the servers sample from.", required=True)
        flags.DEFINE_string(
            "servers", "", "host:port,..., file:PATH or dns:///name:port, as found at the start; none: local ones are "
            "started.",
        )  # fmt: skip
        flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
        flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free one.", 0, 65535)
        flags.DEFINE_string("port_file", "", "Written with the port, in decimal, once it answers.")
        flags.DEFINE_list(
            "names", [], "By which clients may ask for the model, the first is shown; *: by any. Default: the folder's."
        )
        flags.DEFINE_integer("maximum_tokens", 4096, "Of local servers: prompt and completion together.", lower_bound=2)
        flags.DEFINE_float("request_seconds", 600.0, "In which a completion must be sampled.", lower_bound=0.1)
        flags.DEFINE_string("token_file", "", "File with the key that every call must carry; empty: any key will do.")
        flags.DEFINE_string("tls_certificate", "", "PEM of the certificate; empty: no TLS.")
        flags.DEFINE_string("tls_key", "", "PEM of its private key.")
        flags.DEFINE_bool("insecure", False, "Listen beyond this machine without TLS and a token.")
        flags.DEFINE_bool("exit_with_parent", False, "Leave at the end of standard input, with the parent process.")


def gateway() -> None:
    _http()
    if "journal" not in FLAGS:
        flags.DEFINE_string("journal", "", "Folder of the sessions' journals; empty: they are in memory alone.")
        flags.DEFINE_integer("sessions", 1024, "That may be open at a time.", lower_bound=1)
        flags.DEFINE_integer("turns", 10_000, "Of a session at most.", lower_bound=1)
        flags.DEFINE_integer(
            "session_bytes", 2**30, "Of memory for all sessions: then no new one begins.", lower_bound=1
        )


def tinker() -> None:
    _http()
    if "workdir" not in FLAGS:
        flags.DEFINE_string(
            "workdir", None, "Folder of all training runs, checkpoints and calls; the same command goes on with it.",
            required=True,
        )  # fmt: skip
