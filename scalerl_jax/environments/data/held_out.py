"""Which prompts are held out: of all there are, those with the lowest hashes.

    key(text)    blake2b of a prompt's text, with white space evened out, and of the row's own key
    held out     the `count` rows with the lowest keys of their questions

So the choice depends on neither the order of rows nor a seed nor a template; where data grow, it changes only by what
is new and lower. By the same key prompts are the same: two that differ in white space alone are one.
"""

import hashlib

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments.base import Row, joined_content

KEY_BYTES = 16


def question(row: Row, environment: EnvironmentConfig) -> str:
    """What a row asks, before any template: without the system message that config.environment.system_prompt replaces.

    Two rows that differ in that alone are asked as one.
    """
    if environment.system_prompt and row.messages and row.messages[0].get("role") == "system":
        return joined_content(row.messages[1:])
    return row.text


def key(text: str, apart: str = "") -> bytes:
    """[KEY_BYTES] of a prompt's text and of what tells it apart from the same text (Row.key)."""
    whole = " ".join(text.split()) + (f"\0{apart}" if apart else "")
    return hashlib.blake2b(whole.encode("utf-8"), digest_size=KEY_BYTES).digest()
