"""What one accelerator makes of a Llama-3.2-1B-shaped model, and PyTorch beside it: `make bench-accelerator`.

    python -m tests.benchmarks.bench_accelerator [--tiny] [--out=DIR] [--seconds=450] [--only=update,engine]

Random weights; every part runs in a process of its own, so that each has the device to itself, and one that fails
leaves the others:

  update        one optimizer step on one packed row of 16,384 positions, eight segments of 768 to 4,096: tokens/s, MFU,
                peak memory. bfloat16 products, float32 masters, moments and gradients; each block recomputed (remat)
  update, products saved  the same with products and attention kept (remat=save_products)
  torch update  the same step by transformers' Llama in eager PyTorch (accelerator_peer.py says how), recomputing too
  engine        64 slots, each 512 tokens after a prompt of 128; prefill apart
  torch generate  transformers.generate, 64 sequences of the same lengths
  long caches   a decode step of 64 slots at caches of 8,192, of which a half is live: that read, and all of them
  weights       a version after an update: what changed, and all of it
  update, products saved, traced  the kernels of one update, the longest first, and for how long the device had none
  update, traced  the same of blocks that are recomputed
  update, no remat and torch update, no remat

MFU: FLOPs of a forward and a backward pass (products with the weights, head included; causal attention inside each
segment, half of the square) over the chip's dense bfloat16 peak; what remat computes again does not count. Times are
medians after a warm-up; compiling is told apart. `least` is what the compiled programs would take at the least on this
chip (scalerl_jax/planning/program_roofline.py); the traced parts say where most is lost to it. A ratio is ours over the
peer's of the same run; above 1 is in our favour. Parts that would begin after --seconds are left out, and said.

--out gets bench.json. --tiny: the same code at toy size, on a CPU.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_bool("tiny", False, "small sizes; on a CPU in about a minute")
flags.DEFINE_string("out", "build/accelerator", "folder of bench.json")
flags.DEFINE_float("seconds", 450.0, "no part begins later, and none runs on")
flags.DEFINE_list("only", [], "these parts only")
flags.DEFINE_string("part", "", "for its own use: measure this part, and write it to --out as a file")

# Part -> (module, function), in the order of what matters most where time is short.
PARTS = {
    "update": ("accelerator_parts", "update"),
    "update_products_saved": ("accelerator_parts", "update_products_saved"),
    "torch_update": ("accelerator_peer", "update"),
    "engine": ("accelerator_parts", "engine"),
    "torch_generate": ("accelerator_peer", "generate"),
    "long_caches": ("accelerator_parts", "long_caches"),
    "weights": ("accelerator_parts", "weights"),
    "update_products_saved_traced": ("accelerator_parts", "update_products_saved_traced"),
    "update_traced": ("accelerator_parts", "update_traced"),
    "update_without_remat": ("accelerator_parts", "update_without_remat"),
    "torch_update_without_remat": ("accelerator_peer", "update_without_remat"),
}
RATIOS = (
    ("update, tokens/s", "update", "torch_update", "tokens_per_second"),
    ("update without remat, tokens/s", "update_without_remat", "torch_update_without_remat", "tokens_per_second"),
    ("sampling, tokens/s", "engine", "torch_generate", "sampled_tokens_per_second"),
)


def measure(part: str, out: str) -> None:
    from tests.benchmarks import accelerator_model

    module, function = PARTS[part]
    work = accelerator_model.TINY if FLAGS.tiny else accelerator_model.FULL
    found = getattr(importlib.import_module(f"tests.benchmarks.{module}"), function)(work)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


def run_part(part: str, folder: str, seconds: float) -> dict[str, Any]:
    path, log = (os.path.join(folder, f"{part}.{kind}") for kind in ("json", "log"))
    if os.path.exists(path):
        os.remove(path)
    command = [sys.executable, "-m", "tests.benchmarks.bench_accelerator", f"--part={part}", f"--out={path}"]
    environment = dict(os.environ)
    if part.endswith("traced"):  # kernels that are launched together do not say where they come from
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    began = time.monotonic()
    with open(log, "w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                [*command, *(["--tiny"] if FLAGS.tiny else [])],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"left_out": f"not done within {seconds:.0f} s"}
    if code != 0 or not os.path.exists(path):
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()] or [f"exit code {code}"]
        return {"failed": lines[-1][:300]}
    with open(path, encoding="utf-8") as file:
        return {**json.load(file), "part_seconds": time.monotonic() - began}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'part':28}{'tokens/s':>11}{'MFU':>8}{'seconds':>10}{'least':>8}{'first':>8}{'peak GiB':>10}"]
    for part, found in results.items():
        if why := found.get("failed") or found.get("left_out"):
            lines.append(f"{part:28}{'failed' if 'failed' in found else 'left out'}: {why}")
            continue
        cells = {
            "speed": found.get("tokens_per_second") or found.get("sampled_tokens_per_second"),
            "mfu": found.get("mfu"),
            "seconds": found.get("seconds"),
            "least": found.get("least_seconds"),
            "first": found.get("compile_seconds") or found.get("first_seconds") or found.get("start_seconds"),
            "peak": found.get("peak_gib"),
        }
        forms = {
            "speed": "{:,.0f}",
            "mfu": "{:.1%}",
            "seconds": "{:.3f}",
            "least": "{:.3f}",
            "first": "{:.0f}",
            "peak": "{:.1f}",
        }
        text = {name: "" if value is None else forms[name].format(value) for name, value in cells.items()}
        mfu = text["mfu"] or ("unknown" if "model_flops" in found else "")
        lines.append(
            f"{part:28}{text['speed']:>11}{mfu:>8}{text['seconds']:>10}{text['least']:>8}"
            f"{text['first']:>8}{text['peak']:>10}"
        )
    for part, found in results.items():
        if "delta_seconds" in found:
            share = found["changed"] / found["elements"]
            lines.append(
                f"{part}: {share:.2%} changed: {found['delta_bytes'] / 2**20:.1f} MiB, found in "
                f"{found['compare_seconds']:.3f} s, encoded after {found['delta_seconds']:.2f} s; dense "
                f"{found['dense_bytes'] / 2**20:,.0f} MiB in {found['dense_seconds']:.2f} s"
            )
        if "live_step_milliseconds" in found:
            lines.append(
                f"{part}: a step of {found['slots']} slots, half of {found['positions']:,} positions live, "
                f"{found['live_step_milliseconds']:.2f} ms, all read {found['whole_step_milliseconds']:.2f} ms"
            )
        if found.get("kernels"):  # none on a CPU
            lines.append(
                f"{part}: {found['busy_seconds']:.3f} s of kernels, {found['idle_seconds']:.3f} s between them"
            )
            lines += [f"  {spent * 1e3:8.2f} ms {calls:6} x {name[:90]}" for name, spent, calls in found["kernels"]]
        if found.get("places"):
            lines.append(f"{part}: furthest from the least time, measured and least")
            lines += [f"  {1e3 * ran:8.2f} ms {1e3 * least:8.2f} ms {place}" for place, ran, least in found["places"]]
        if "prefill_tokens_per_second" in found:
            least = found.get("least_step_milliseconds")
            lines.append(
                f"{part}: a step of {found['slots']} slots {found['step_milliseconds']:.2f} ms"
                + (f", at the least {least:.2f} with the longest cache" if least else "")
                + f"; prefill {found['prefill_tokens_per_second']:,.0f} tokens/s"
            )
            lines += [f"  {spent:8.3f} ms {place}" for place, spent in found.get("step_places", ())]
    return lines


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ours over PyTorch's, of what both have measured."""
    out = {}
    for name, ours, theirs, field in RATIOS:
        if field in results.get(ours, {}) and field in results.get(theirs, {}):
            out[name] = results[ours][field] / results[theirs][field]
    return out


def main(_: list[str]) -> None:
    if FLAGS.part:
        measure(FLAGS.part, FLAGS.out)
        return
    unknown = set(FLAGS.only) - set(PARTS)
    if unknown:
        raise app.UsageError(f"--only={','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    os.makedirs(FLAGS.out, exist_ok=True)
    deadline = time.monotonic() + FLAGS.seconds
    results: dict[str, dict[str, Any]] = {}
    for part in FLAGS.only or PARTS:
        if PARTS[part][0] == "accelerator_peer" and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
            results[part] = {"left_out": "torch and transformers are not installed"}
            continue
        left = deadline - time.monotonic()
        results[part] = run_part(part, FLAGS.out, left) if left > 0 else {"left_out": "the time is up"}
        why = results[part].get("failed") or results[part].get("left_out")
        print(f"{part}: {why or 'done'} ({FLAGS.seconds - (deadline - time.monotonic()):.0f} s)", flush=True)
    compared = ratios(results)
    device = next((found["device"] for found in results.values() if "device" in found), "unknown")
    path = os.path.join(FLAGS.out, "bench.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"device": device, "tiny": FLAGS.tiny, "parts": results, "ratios": compared}, file, indent=2)
    print(f"\non {device}{', tiny' if FLAGS.tiny else ''}:")
    print("\n".join(table(results)))
    for name, ratio in compared.items():
        print(f"{name}: {ratio:.2f} of PyTorch's")
    print(f"written: {path}")
    if any("failed" in found for found in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
