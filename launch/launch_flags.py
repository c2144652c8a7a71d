"""The flags of scalerl-launch. Apart from what reads them, so that --help and a wrong flag are answered at once."""

from absl import flags

TARGET = flags.DEFINE_enum("target", None, ["kubernetes", "slurm"], "Where the run goes.", required=True)
OUT = flags.DEFINE_string("out", "", "Folder to make; default: NAME-TARGET here.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only write the files; without it they are applied (kubectl, sbatch).")
NAME = flags.DEFINE_string("name", "", "Of the run, in all that is made; default: the config file's.")
PART = flags.DEFINE_enum("part", "all", ["all", "trainer", "generators"], "One of the two, where they are apart.")
WORKDIR = flags.DEFINE_string(
    "workdir", "", "Folder of the run: under /runs of the volume (kubernetes), on the shared file system (slurm); "
    "default: runs/NAME.",
)  # fmt: skip

_MACHINE = "v5p:4x4x4 (a TPU slice), h200:2x8 (two nodes of 8 GPUs) or cpu:1."
TRAINER = flags.DEFINE_string("trainer", "", f"What the trainer runs on: {_MACHINE}")
GENERATOR = flags.DEFINE_string("generator", "", "What one generator runs on: h100:2 (tensor-parallel over 2), cpu.")
GENERATORS = flags.DEFINE_integer("generators", 1, "How many.", lower_bound=1)
ENGINE = flags.DEFINE_enum("engine", "", ["", "jax", "vllm"], "Of the generators; default: vllm on GPUs, else jax.")
SERVERS = flags.DEFINE_string(
    "servers", "", "With --part=trainer: its generators, as scalerl-train has it: dns:///name:port, ..."
)
GRACE = flags.DEFINE_integer(
    "grace_seconds", 300, "That the trainer has to save after SIGTERM; it leaves as soon as it has.", 15, 7200
)
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 20, "Of the trainer after failures; preemptions are not counted.", lower_bound=0
)
TRAINER_ENV = flags.DEFINE_list("trainer_env", [], "NAME=VALUE,... of the trainer's environment (NCCL, proxies).")
GENERATOR_ENV = flags.DEFINE_list("generator_env", [], "NAME=VALUE,... of the generators' environment.")
INSECURE = flags.DEFINE_bool(
    "insecure", False, "No TLS and no token: every client that reaches a generator may replace its weights."
)
TOKEN_FILE = flags.DEFINE_string(
    "token_file", "", "With the token that every call carries (slurm: on the shared file system); kubernetes makes one."
)
TLS_AUTHORITY = flags.DEFINE_string(
    "tls_authority", "", "PEM of who signs the generators' certificates; kubernetes: with --part=trainer."
)

# Kubernetes alone.
TRAINER_IMAGE = flags.DEFINE_string("trainer_image", "", "Container image of the trainer.")
GENERATOR_IMAGE = flags.DEFINE_string("generator_image", "", "Container image of the generators.")
NAMESPACE = flags.DEFINE_string("namespace", "default", "That all of it is in; made where it is missing.")
TRAINER_KIND = flags.DEFINE_enum(
    "trainer_kind", "jobset", ["jobset", "lws"], "A JobSet, or a LeaderWorkerSet where that is what is installed."
)
SLICES = flags.DEFINE_integer("slices", 1, "TPU slices of the trainer, each one --trainer.", lower_bound=1)
STORAGE_CLASS = flags.DEFINE_string("storage_class", "", "Of the volumes; default: the cluster's.")
STORAGE_SIZE = flags.DEFINE_string("storage_size", "1Ti", "Of the volume with the run folder.")
MODELS_SIZE = flags.DEFINE_string("models_size", "200Gi", "Of the volume with models and data sets.")
RUNS_CLAIM = flags.DEFINE_string("runs_claim", "", "A PersistentVolumeClaim for /runs that is there; none is made.")
MODELS_CLAIM = flags.DEFINE_string("models_claim", "", "Likewise for /models.")
HUB_MODEL = flags.DEFINE_string("hub_model", "", "Model of the hub that a Job brings to /models, as Qwen/Qwen3-8B.")
HUB_DATASET = flags.DEFINE_string("hub_dataset", "", "Data set of the hub that the same Job brings.")
ISSUER = flags.DEFINE_string(
    "issuer", "", "KIND/NAME of a cert-manager issuer that is there; default: an authority of the run's own."
)
TRAINER_NODES = flags.DEFINE_list(
    "trainer_nodes", [], "LABEL=VALUE,... of the trainer's nodes, for those of --trainer."
)
GENERATOR_NODES = flags.DEFINE_list("generator_nodes", [], "LABEL=VALUE,... of the generators' nodes.")
TRAINER_RESOURCES = flags.DEFINE_list("trainer_resources", [], "cpu=8,memory=64Gi of each host; default: no request.")
GENERATOR_RESOURCES = flags.DEFINE_list("generator_resources", [], "cpu=8,memory=64Gi of each; default: no request.")
AUTOSCALE = flags.DEFINE_enum(
    "autoscale", "none", ["none", "hpa", "keda"], "Generators come and go, so that most of their slots are busy."
)
MAXIMUM_GENERATORS = flags.DEFINE_integer("maximum_generators", 0, "With --autoscale; --generators is the least.", 0)
BUSY_TARGET = flags.DEFINE_float(
    "busy_target", None, "With --autoscale: the share of the generators' slots that is to be busy; default: 0.8.", 0.1,
    0.9,
)  # fmt: skip
PROMETHEUS = flags.DEFINE_string(
    "prometheus", "http://prometheus-server.monitoring.svc", "With --autoscale=keda: where the metrics are asked for."
)

# Slurm alone.
PARTITION = flags.DEFINE_string("partition", "", "Of the trainer; default: the cluster's.")
GENERATOR_PARTITION = flags.DEFINE_string("generator_partition", "", "Of the generators; default: --partition.")
ACCOUNT = flags.DEFINE_string("account", "", "That the jobs are booked on.")
TIME = flags.DEFINE_string("time", "24:00:00", "Limit of one job; the trainer is queued again when it is up.")
TRAINER_CPUS = flags.DEFINE_integer(
    "trainer_cpus", 0, "CPUs of each node of the trainer; default: all, the nodes are its alone.", lower_bound=0
)
TRAINER_MEMORY = flags.DEFINE_string("trainer_memory", "0", "Memory of each of its nodes, as 512G; 0: all.")
GENERATOR_CPUS = flags.DEFINE_integer(
    "generator_cpus", 0, "CPUs of a generator; default: the cluster's.", lower_bound=0
)
GENERATOR_MEMORY = flags.DEFINE_string(
    "generator_memory", "", "Memory of a generator, as 128G; default: the cluster's."
)
TRAINER_SBATCH = flags.DEFINE_multi_string(
    "trainer_sbatch", [], "An option of sbatch for the trainer, as in --trainer_sbatch=--qos=long"
)
GENERATOR_SBATCH = flags.DEFINE_multi_string("generator_sbatch", [], "Likewise for the generators")
SETUP = flags.DEFINE_string("setup", "", "Shell line before the trainer, as in 'source ~/trainer/bin/activate'.")
GENERATOR_SETUP = flags.DEFINE_string("generator_setup", "", "Likewise before a generator.")
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM of the generators' certificate.")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM of its private key.")
TLS_NAME = flags.DEFINE_string("tls_name", "", "That the certificate carries; default: each host's own.")

# What the other target does not read.
ONLY = {
    "kubernetes": (
        TRAINER_IMAGE, GENERATOR_IMAGE, NAMESPACE, TRAINER_KIND, SLICES, STORAGE_CLASS, STORAGE_SIZE,
        MODELS_SIZE, RUNS_CLAIM, MODELS_CLAIM, HUB_MODEL, HUB_DATASET, ISSUER, TRAINER_NODES, GENERATOR_NODES,
        TRAINER_RESOURCES, GENERATOR_RESOURCES, AUTOSCALE, MAXIMUM_GENERATORS, BUSY_TARGET, PROMETHEUS,
    ),
    "slurm": (
        PARTITION, GENERATOR_PARTITION, ACCOUNT, TIME, TRAINER_CPUS, TRAINER_MEMORY, GENERATOR_CPUS, GENERATOR_MEMORY,
        TRAINER_SBATCH, GENERATOR_SBATCH, SETUP, GENERATOR_SETUP, TLS_CERTIFICATE, TLS_KEY, TLS_NAME,
    ),
}  # fmt: skip
