"""What this machine's products are fast in. Nothing of JAX is started.

bfloat16 operands are fast on accelerators and on CPUs that multiply them themselves, with AMX or AVX512: seven times
as fast as float32 in a product, twice as fast in an update of some 30M parameters. Other CPUs turn each of them into a
float32 one first.
"""

import os
import re
from collections.abc import Mapping

from scalerl_jax.system import platforms

# As Linux calls them. Those of ARM are left out: XLA has no kernel for them that was measured.
_MULTIPLIES_BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512"}


def fastest_dtype(
    environment: Mapping[str, str] | None = None, *, cpuinfo: str = "/proc/cpuinfo", accelerated: bool | None = None
) -> tuple[str, str]:
    """(dtype of matrix products, why), for a process that is started in this environment (default: ours).

    accelerated: whether it computes on an accelerator; None: as JAX would find out.
    """
    environment = os.environ if environment is None else environment
    if platforms.accelerated(environment) if accelerated is None else accelerated:
        return "bfloat16", "an accelerator"
    for flag in _cpu_flags(cpuinfo):
        if flag in _MULTIPLIES_BFLOAT16:
            return "bfloat16", f"a CPU with {_MULTIPLIES_BFLOAT16[flag]} for it"
    return "float32", "a CPU without AMX and AVX512 for bfloat16"


def _cpu_flags(path: str) -> list[str]:
    """The best first; none where the system does not tell."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = re.search(r"^flags\s*:(.*)", file.read(), re.MULTILINE)
    except OSError:
        return []
    return sorted(found[1].split()) if found else []
