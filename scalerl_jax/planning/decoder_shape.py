"""The decoder's shape for a plan: a config.json is enough, the weights need not be there.

In this order: --model_config; config.model.path, where that folder is here; config.sft.model_file; NAME.json beside the
config file NAME.py.
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.model.decoder_config import DecoderConfig, config_of_file, read_config


def find(config: Config, *, config_file: str, model_config: str) -> tuple[DecoderConfig, str]:
    """(shape, the file it is from). Raises ValueError, one line, where there is none, and OSError.

    config_file: as --config names it; "": none. model_config: as --model_config gives it, a file or a folder.
    """
    if model_config:
        if os.path.isdir(model_config):
            return read_config(model_config), os.path.join(model_config, "config.json")
        if not os.path.isfile(model_config):
            raise ValueError(f"--model_config={model_config}: no such file")
        return config_of_file(model_config), model_config
    if config.model.path and os.path.isfile(os.path.join(config.model.path, "config.json")):
        return read_config(config.model.path), os.path.join(config.model.path, "config.json")
    beside = os.path.splitext(config_file)[0] + ".json" if config_file else ""
    for file in (config.sft.model_file, beside):
        if file and os.path.isfile(file):
            return config_of_file(file), file
    raise ValueError(
        f"config.model.path={config.model.path}: no config.json there, so the decoder's shape is not known: "
        "--model_config=FILE names one"
    )
