"""The flags of the commands that have a workdir or a page, apart from what reads them: --help and a wrong flag are
answered before jax is imported.

Each function may be called more than once. The flags of the config are not absl's: config_io.py reads them.
"""

from absl import flags

FLAGS = flags.FLAGS
_ALLOW = "Config fields (name,...) to go on with other values of, though that changes what is learned."


def train() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string("workdir", None, "Folder of the run; a run found there goes on.", required=True)
        flags.DEFINE_string(
            "servers", "", "host:port,..., file:PATH or dns:///name:port; none: local ones are started."
        )
        flags.DEFINE_list("allow", [], _ALLOW)


def sft() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string(
            "workdir", None, "Folder of the warm start; the model will be WORKDIR/model.", required=True
        )
        flags.DEFINE_list("allow", [], _ALLOW)


def export() -> None:
    if "workdir" not in FLAGS:
        flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
        flags.DEFINE_string("out", None, "Folder to make; must not exist.", required=True)
        flags.DEFINE_enum(
            "dtype", "", ["", "float32", "bfloat16"], "Of the weights; default: what the generators hold."
        )
        flags.DEFINE_string("model", "", "Folder of the model the run started from, where it has moved.")


def report() -> None:
    if "out" not in FLAGS:
        flags.DEFINE_string("out", None, "File (or folder) of the page; one run's own folder where it is left out.")
