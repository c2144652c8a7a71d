"""Which prompts are held out: of all there are, those with the lowest hashes.

    key(row)    blake2b of the prompt's text, as it is before any template, with white space evened out
    held out    the `count` rows with the lowest keys

So the choice depends on neither the order of rows nor a seed; where data grow, it changes only by what is new and
lower. By the same key prompts are the same: two that differ in white space alone are one.
"""

import hashlib

KEY_BYTES = 16


def key(text: str) -> bytes:
    """[KEY_BYTES] of a prompt's text."""
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=KEY_BYTES).digest()
