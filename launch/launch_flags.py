"""The flags of scalerl-launch. No heavy imports: --help and a wrong flag are answered at once."""

from absl import flags

TARGET = flags.DEFINE_enum("target", None, ["kubernetes", "slurm"], "Where the run is launched.", required=True)
OUT = flags.DEFINE_string("out", "", "Folder to write. Default: NAME-TARGET here.")
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Only write the files. Without it they are applied too, by kubectl or sbatch."
)
NAME = flags.DEFINE_string(
    "name", "", "Name of the run, part of the name of everything it makes. Default: the config file's."
)
PART = flags.DEFINE_enum(
    "part", "all", ["all", "trainer", "generators"], "all, or one of the two if they run in different places."
)
WORKDIR = flags.DEFINE_string(
    "workdir", "", "Folder of the run: under /runs of the volume (kubernetes), or on the shared file system (slurm). "
    "Default: runs/NAME.",
)  # fmt: skip

_MACHINE = "v5p:4x4x4 (a TPU slice), h200:2x8 (two nodes of 8 GPUs) or cpu:1."
TRAINER = flags.DEFINE_string("trainer", "", f"What the trainer runs on: {_MACHINE}")
GENERATOR = flags.DEFINE_string("generator", "", "What one generator runs on: h100:2 (tensor-parallel over 2), cpu.")
GENERATORS = flags.DEFINE_integer("generators", 1, "Number of generators.", lower_bound=1)
ENGINE = flags.DEFINE_enum(
    "engine",
    "",
    ["", "jax", "vllm"],
    "Engine of the generators. Default: vllm on GPUs with config.numerics=fast, else jax.",
)
SERVERS = flags.DEFINE_string(
    "servers", "", "With --part=trainer: the generators, as scalerl-train takes them, such as dns:///name:port."
)
GRACE = flags.DEFINE_integer(
    "grace_seconds", 300, "Seconds that the trainer has to save after SIGTERM; it exits as soon as it has.", 15, 7200
)
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 20, "Most restarts of the trainer after failures. Preemptions do not count.", lower_bound=0
)
TRAINER_ENV = flags.DEFINE_list(
    "trainer_env", [], "Environment variables of the trainer, NAME=VALUE,... (NCCL, proxies)."
)
GENERATOR_ENV = flags.DEFINE_list("generator_env", [], "Environment variables of the generators, NAME=VALUE,...")
INSECURE = flags.DEFINE_bool(
    "insecure", False, "No TLS and no token: every client that reaches a generator may replace its weights."
)
TOKEN_FILE = flags.DEFINE_string(
    "token_file", "", "File with the token that every call carries (slurm: on the shared file system). Kubernetes "
    "makes one if it is not given.",
)  # fmt: skip
TLS_AUTHORITY = flags.DEFINE_string(
    "tls_authority", "", "PEM file of the authority that signs the generators' certificates. Kubernetes: only with "
    "--part=trainer.",
)  # fmt: skip

# For kubernetes only; fields of kubernetes.Cluster.
TRAINER_IMAGE = flags.DEFINE_string("trainer_image", "", "Container image of the trainer.")
GENERATOR_IMAGE = flags.DEFINE_string("generator_image", "", "Container image of the generators.")
NAMESPACE = flags.DEFINE_string("namespace", "default", "Namespace of everything; made if it is missing.")
TRAINER_KIND = flags.DEFINE_enum(
    "trainer_kind", "jobset", ["jobset", "lws"], "Run the trainer as a JobSet or as a LeaderWorkerSet."
)
SLICES = flags.DEFINE_integer("slices", 1, "TPU slices of the trainer, each as large as --trainer.", lower_bound=1)
STORAGE_CLASS = flags.DEFINE_string("storage_class", "", "Storage class of the volumes. Default: the cluster's.")
STORAGE_SIZE = flags.DEFINE_string("storage_size", "1Ti", "Size of the volume with the run folder.")
MODELS_SIZE = flags.DEFINE_string("models_size", "200Gi", "Size of the volume with models and data sets.")
RUNS_CLAIM = flags.DEFINE_string("runs_claim", "", "Existing PersistentVolumeClaim for /runs. Default: one is made.")
MODELS_CLAIM = flags.DEFINE_string(
    "models_claim", "", "Existing PersistentVolumeClaim for /models. Default: one is made."
)
HUB_MODEL = flags.DEFINE_string(
    "hub_model", "", "Model of the Hugging Face hub that a Job downloads to /models, such as Qwen/Qwen3-8B."
)
HUB_DATASET = flags.DEFINE_string("hub_dataset", "", "Data set of the hub that the same Job downloads.")
ISSUER = flags.DEFINE_string(
    "issuer", "", "Existing cert-manager issuer, KIND/NAME. Default: an authority of this run alone."
)
TRAINER_NODES = flags.DEFINE_list(
    "trainer_nodes", [], "Labels of the trainer's nodes, LABEL=VALUE,..., in place of those of --trainer."
)
GENERATOR_NODES = flags.DEFINE_list(
    "generator_nodes", [], "Labels of the generators' nodes, LABEL=VALUE,..., in place of those of --generator."
)
TRAINER_RESOURCES = flags.DEFINE_list(
    "trainer_resources", [], "Resources of each trainer host, such as cpu=8,memory=64Gi. Default: no request."
)
GENERATOR_RESOURCES = flags.DEFINE_list(
    "generator_resources", [], "Resources of each generator, such as cpu=8,memory=64Gi. Default: no request."
)
AUTOSCALE = flags.DEFINE_enum(
    "autoscale", "none", ["none", "hpa", "keda"], "Start and stop generators so that most of their slots are busy."
)
MAXIMUM_GENERATORS = flags.DEFINE_integer(
    "maximum_generators", 0, "With --autoscale: most generators. --generators is the least.", 0
)
BUSY_TARGET = flags.DEFINE_float(
    "busy_target", None, "With --autoscale: share of the generators' slots to keep busy. Default: 0.8.", 0.1, 0.9
)
PROMETHEUS = flags.DEFINE_string(
    "prometheus", "http://prometheus-server.monitoring.svc", "With --autoscale=keda: address of the Prometheus server."
)

# For slurm only; fields of slurm.Queue.
PARTITION = flags.DEFINE_string("partition", "", "Partition of the trainer. Default: the cluster's.")
GENERATOR_PARTITION = flags.DEFINE_string(
    "generator_partition", "", "Partition of the generators. Default: --partition."
)
ACCOUNT = flags.DEFINE_string("account", "", "Account that the jobs are charged to.")
TIME = flags.DEFINE_string("time", "24:00:00", "Time limit of a job. The trainer is queued again when its time is up.")
TRAINER_CPUS = flags.DEFINE_integer(
    "trainer_cpus", 0, "CPUs of each node of the trainer. Default: all of them, on nodes of its own.", lower_bound=0
)
TRAINER_MEMORY = flags.DEFINE_string(
    "trainer_memory", "0", "Memory of each node of the trainer, such as 512G; 0: all of it."
)
GENERATOR_CPUS = flags.DEFINE_integer(
    "generator_cpus", 0, "CPUs of a generator. Default: the cluster's.", lower_bound=0
)
GENERATOR_MEMORY = flags.DEFINE_string(
    "generator_memory", "", "Memory of a generator, such as 128G. Default: the cluster's."
)
TRAINER_SBATCH = flags.DEFINE_multi_string(
    "trainer_sbatch", [], "Further option of sbatch for the trainer, as in --trainer_sbatch=--qos=long; may be "
    "repeated.",
)  # fmt: skip
GENERATOR_SBATCH = flags.DEFINE_multi_string(
    "generator_sbatch", [], "Further option of sbatch for the generators; may be repeated."
)
SETUP = flags.DEFINE_string(
    "setup", "", "Shell line that runs before the trainer, such as 'source ~/trainer/bin/activate'."
)
GENERATOR_SETUP = flags.DEFINE_string("generator_setup", "", "Shell line that runs before a generator.")
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file of the generators' certificate.")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file of its private key.")
TLS_NAME = flags.DEFINE_string("tls_name", "", "Name in the generators' certificate. Default: each host's own.")
