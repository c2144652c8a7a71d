"""A model's name on the Hugging Face hub where a folder is wanted."""

import os
import re

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_folder(field: str, path: str) -> None:
    """Raises ValueError, one line, where no folder is given, or what may be the name of a model of the hub and is no
    folder here: with the command that fetches it, after which the same config will do."""
    if not path:
        raise ValueError(f"{field}: no model folder is given")
    if _NAME.fullmatch(path) and not os.path.exists(path):
        raise ValueError(
            f"{field}={path}: no such folder; if it is a model of the hub: hf download {path} --local-dir={path}"
        )
