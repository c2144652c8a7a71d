"""The flags of scalerl-serve. Apart from what they start, so that --help and a wrong flag are answered at once."""

from absl import flags

_DTYPES = ["bfloat16", "float32"]

ENGINE = flags.DEFINE_enum("engine", None, ["jax", "vllm", "replay"], "What samples the tokens.", required=True)
MODEL = flags.DEFINE_string("model", "", "Hugging Face folder: config.json, *.safetensors, tokenizer.json.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
PORT = flags.DEFINE_integer("port", None, "Port to listen on; 0: any free one.", 0, 65535, required=True)
PORT_FILE = flags.DEFINE_string("port_file", "", "Written with the port, in decimal, once the server answers.")
EXIT_WITH_PARENT = flags.DEFINE_bool("exit_with_parent", False, "Stop at the end of standard input.")
SLOTS = flags.DEFINE_integer("slots", 64, "Completions sampled at once.", lower_bound=1)
QUEUE = flags.DEFINE_integer("queue", 128, "Completions that may wait for a slot.", lower_bound=0)
DECODE_CHUNK = flags.DEFINE_integer("decode_chunk", 8, "Not vllm: decode steps between two looks at the queue.", 1)
COMPUTE_DTYPE = flags.DEFINE_enum("compute_dtype", "bfloat16", _DTYPES, "Of the matrix products.")
SYNC_DTYPE = flags.DEFINE_enum("sync_dtype", "bfloat16", _DTYPES, "In which the weights come.")
HEAD_PRECISION = flags.DEFINE_enum(
    "head_precision", "default", ["default", "highest"], "Operands of the head: in compute_dtype, or in float32."
)
MAXIMUM_TOKENS = flags.DEFINE_integer("maximum_tokens", 4096, "Prompt and completion together.", lower_bound=2)

TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "vllm: devices that share the model.", lower_bound=1)
DEVICE_MEMORY = flags.DEFINE_float("device_memory", 0.9, "vllm: the share of a GPU's memory to take.", 0.05, 1.0)
FAULTS = flags.DEFINE_string("faults", "", "For tests: kind:after,... of what goes wrong on the wire (faults.py).")
REPLAY_FILE = flags.DEFINE_string("replay_file", "", "JSONL of completions to play; empty: made up by a hash.")
REPLAY_VOCABULARY = flags.DEFINE_integer("replay_vocabulary", 256, "Made-up tokens are below this.", lower_bound=1)
REPLAY_MEAN_TOKENS = flags.DEFINE_float("replay_mean_tokens", 24.0, "Mean length of what is made up.", lower_bound=2)
REPLAY_TOKEN_SECONDS = flags.DEFINE_float("replay_token_seconds", 0.0, "Time of one decode step.", lower_bound=0)
REPLAY_LOAD_SECONDS = flags.DEFINE_float("replay_load_seconds", 0.0, "Pause at new weights.", lower_bound=0)
REPLAY_CRASH_AFTER = flags.DEFINE_integer("replay_crash_after", 0, "Die after so many completions.", lower_bound=0)
REPLAY_HANG_AFTER = flags.DEFINE_integer("replay_hang_after", 0, "Hang after so many completions.", lower_bound=0)

# Who may call, see access_flags.py.
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM of this server's certificate; empty: no TLS.")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM of its private key.")
TLS_CLIENT_AUTHORITY = flags.DEFINE_string(
    "tls_client_authority", "", "PEM of who signs the clients' certificates; empty: none is asked for."
)
TLS_AUTHORITY = flags.DEFINE_string(
    "tls_authority", "", "PEM of who signs the other servers' certificates; empty: no weights are passed on to them."
)
TOKEN_FILE = flags.DEFINE_string("token_file", "", "File with the token that every call must carry; empty: none.")
RELAY_TO = flags.DEFINE_string(
    "relay_to",
    None,
    "Hosts and networks beyond this machine that weights may be passed on to: 10.0.0.0/8,gpu7.example,.pods.example "
    "(a name that ends so). Not given: whoever shows a certificate of --tls_authority, and without TLS nobody.",
)
INSECURE = flags.DEFINE_bool(
    "insecure", False, "Listen beyond this machine without TLS and a token: whoever reaches it may replace its weights."
)
