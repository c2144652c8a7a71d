"""Float64 on the CPU for the fits, whatever the process around them computes in.

Sums of squares of scores that differ in the fourth digit need it, and a trainer that watches its own forecast must not
have its accelerator or its float32 default touched.
"""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Within it, jax computes in float64 on this process's first CPU device."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
