"""Judges the programs on standard input by a Python that has the standard library and no more: numpy is not needed."""

import json
import pathlib
import sys
import types

ROOT = pathlib.Path(__file__).parent / "scalerl_jax"
sys.path.insert(0, str(ROOT.parent))
package = types.ModuleType("scalerl_jax.environments")  # without what its __init__ imports
package.__path__ = [str(ROOT / "environments")]
sys.modules[package.__name__] = package

from scalerl_jax.config import SandboxConfig  # noqa: E402
from scalerl_jax.environments.code_judge import judge  # noqa: E402
from scalerl_jax.environments.sandbox import Limits, check  # noqa: E402

verdicts = {}
for name, (program, tests, limits) in json.load(sys.stdin).items():
    config = SandboxConfig(**limits)
    check(Limits.of(config))
    verdict = judge(program, tests, config)
    verdicts[name] = [verdict.kind, verdict.why]
print(json.dumps(verdicts))
