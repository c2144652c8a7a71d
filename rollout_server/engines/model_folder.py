"""Checks the folder that --model names, before anything slow is imported."""

import glob
import os


class UsageError(Exception):
    """The user's mistake: one line, exit code 2."""


def check(folder: str, *, weights: bool) -> None:
    """Raises UsageError naming what is missing. weights: whether the weights are needed too."""
    if not folder:
        raise UsageError("--model: a Hugging Face folder is needed")
    if not os.path.isdir(folder):
        raise UsageError(f"--model={folder}: no such folder")
    for name in ("config.json", "tokenizer.json"):
        if not os.path.isfile(os.path.join(folder, name)):
            raise UsageError(f"--model={folder}: it has no {name}")
    if weights and not glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
        raise UsageError(f"--model={folder}: it has no weights (*.safetensors)")
