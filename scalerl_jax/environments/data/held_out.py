"""Selects the held-out prompts: those with the lowest hashes.

    key(text)    blake2b of a prompt's text, with white space normalized, and of Row.key
    held out     the `count` rows with the lowest keys of their questions

So the selection does not depend on the order of rows, a seed or a template; when data are added, only new rows with
lower keys enter it. The same key identifies duplicates: prompts that differ only in white space are the same.
"""

import hashlib

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments.base import Row, joined_content

KEY_BYTES = 16


def question(row: Row, environment: EnvironmentConfig) -> str:
    """A row's question before any template, without a system message that config.environment.system_prompt replaces.

    Rows that differ only in that message get the same prompt.
    """
    if environment.system_prompt and row.messages and row.messages[0].get("role") == "system":
        return joined_content(row.messages[1:])
    return row.text


def key(text: str, apart: str = "") -> bytes:
    """[KEY_BYTES] hash of a prompt's text and of `apart`, which distinguishes equal texts (Row.key)."""
    whole = " ".join(text.split()) + (f"\0{apart}" if apart else "")
    return hashlib.blake2b(whole.encode("utf-8"), digest_size=KEY_BYTES).digest()
