"""The flags of scalerl-serve. No heavy imports: --help and a wrong flag are answered at once."""

from absl import flags

_DTYPES = ["bfloat16", "float32"]

ENGINE = flags.DEFINE_enum("engine", None, ["jax", "vllm"], "What samples the tokens.", required=True)
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
PORT = flags.DEFINE_integer("port", None, "Port to listen on; 0: any free one.", 0, 65535, required=True)
PORT_FILE = flags.DEFINE_string(
    "port_file", "", "File that the port is written to, in decimal, once the server answers."
)
EXIT_WITH_PARENT = flags.DEFINE_bool("exit_with_parent", False, "Stop at the end of standard input.")

# The fields of EngineOptions, which every engine gets.
flags.DEFINE_string("model", "", "Hugging Face folder: config.json, *.safetensors, tokenizer.json.")
flags.DEFINE_integer("slots", 64, "Completions sampled at once.", lower_bound=1)
flags.DEFINE_integer("queue", 128, "Completions that may wait for a slot.", lower_bound=0)
flags.DEFINE_integer("decode_chunk", 8, "Decode steps until the queue is read again; not for vllm.", 1)
flags.DEFINE_enum(
    "compute_dtype", "auto", ["auto", *_DTYPES], "Dtype of the matrix products. auto: bfloat16 on accelerators and on "
    "CPUs with AMX or AVX512 for it, else float32, and float32 with --sync_dtype=float32.",
)  # fmt: skip
flags.DEFINE_enum("sync_dtype", "bfloat16", _DTYPES, "Dtype in which weights arrive.")
flags.DEFINE_enum(
    "head_precision", "default", ["default", "highest", "bfloat16"], "Precision of the output head. default: operands "
    "in compute_dtype, float32 logits; highest: float32 operands; bfloat16: logits rounded to bfloat16.",
)  # fmt: skip
flags.DEFINE_enum(
    "numerics", "fast", ["fast", "bitwise"], "bitwise: compute the same bits as the trainer, for "
    "config.numerics=bitwise; jax engine only.",
)  # fmt: skip
flags.DEFINE_integer("maximum_tokens", 4096, "Longest prompt and completion together.", lower_bound=2)
flags.DEFINE_bool(
    "router_replay", False, "Be able to return the experts of each token, for config.rollout.router_replay."
)

METRICS_PORT = flags.DEFINE_integer(
    "metrics_port", None, "Port that serves the metrics to Prometheus over HTTP; 0 takes any free one. Not given: none "
    "is served.", 0, 65535,
)  # fmt: skip
METRICS_HOST = flags.DEFINE_string(
    "metrics_host", "127.0.0.1", "Address that --metrics_port listens on. Every client that reaches it may read the "
    "metrics.",
)  # fmt: skip

# Who may call, see serve.py.
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file of this server's certificate. Empty: no TLS.")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file of its private key.")
TLS_CLIENT_AUTHORITY = flags.DEFINE_string(
    "tls_client_authority", "", "PEM file of the authority that signs clients' certificates. Empty: clients need none."
)
TOKEN_FILE = flags.DEFINE_string("token_file", "", "File with the token that every call must carry. Empty: none.")
INSECURE = flags.DEFINE_bool(
    "insecure",
    False,
    "Listen beyond this machine without TLS and a token: every client that reaches it may replace its weights.",
)

TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "Devices that share the model; vllm only.", lower_bound=1)
DEVICE_MEMORY = flags.DEFINE_float("device_memory", 0.9, "Share of a GPU's memory to use; vllm only.", 0.05, 1.0)
