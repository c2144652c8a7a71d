"""What an evaluation finds, for tests that write down a run without one."""

from collections.abc import Sequence
from typing import Any


def counted(passes: Sequence[int], samples: int, **more: Any) -> dict[str, Any]:
    """As pass_rates.numbers gives it, in short."""
    rate = sum(passes) / (len(passes) * samples)
    return {"prompts": len(passes), "samples": samples, "pass_rate": rate, "passes": list(passes), **more}
