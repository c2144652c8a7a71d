"""What the numbers of a run folder mean: every key of metrics.jsonl, evals.jsonl and ledger.json, with its unit.

Nested keys are joined by "/", as TensorBoard and W&B name them (trackers.py); `*` stands for a name that the run gives:
a server, an environment, a task, a staleness. The reference of metrics in the documentation is made of these tables.
A test holds them against a run's rows, so a key that is written and not explained here fails it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# key -> (unit, meaning)
Names = dict[str, tuple[str, str]]

ROW: Names = {
    "step": ("steps", "optimizer step: how many batches have been trained on, this one included"),
    "time": ("unix seconds", "when the row was written"),
    "incarnation": ("", "number of the trainer process that wrote it; a restarted trainer has a larger one"),
}
BATCH: Names = {
    "pass_rate": ("share", "completions of the batch that are correct; one cut by its token budget is not"),
    "reward": ("reward", "mean over the completions of the batch; -1 for one cut by its token budget"),
    "prompts": ("prompts", "prompts in the batch, with one group of completions each"),
    "prompts_surviving": ("prompts", "prompts that the update learns from: those with both correct and wrong "
                          "completions, and with objective.distill those with a teacher"),
    "prompts_retired": ("prompts", "training prompts that the curriculum no longer draws"),
    "completions_counted": ("completions", "completions of surviving prompts, those excluded for truncation left out"),
    "truncated": ("share", "completions cut by their token budget"),
    "interrupted": ("share", "completions whose thinking was ended by the interruption text"),
    "no_end_of_thinking": ("share", "completions without the end of thinking, so without an answer; "
                           "only where there is a thinking budget"),
    "length_mean": ("tokens", "sampled tokens of a completion, mean"),
    "length_max": ("tokens", "sampled tokens of the longest completion"),
    "length_quantiles": ("tokens", "0, 10, ... 100 % of the completions have at most so many tokens, forced ones "
                         "included; a list"),
    "repetition": ("share", "4-grams of a completion that occurred before in it, mean over completions"),
    "repetitive": ("share", "completions that end in a loop: half of the 4-grams in their last 512 tokens are repeats"),
    "score/*": ("", "mean of a metric that the score gave: a Score's own, rewards/NAME for each of several rewards, "
                "rewards/NAME/errors for the share of completions that it failed on, length_penalty"),
    "groups": ("", "pairs (group number, index of the prompt) that the batch was made of; a list"),
}  # fmt: skip
STALENESS: Names = {
    "lag_mean": ("steps", "staleness of a sampled token: the batch it is trained in minus the version that sampled it"),
    "lag_max": ("steps", "largest staleness in the batch; at most pacing.max_off_policy_steps"),
    "lags/*": ("tokens", "sampled tokens of the batch by their staleness, trained on or not"),
}
UPDATE: Names = {
    "loss": ("", "the loss as it was minimized, summed over the weighted loss tokens"),
    "loss_tokens": ("tokens", "sampled tokens that the loss is over"),
    "gradient_norm": ("", "global norm of the gradient, before it is clipped"),
    "step_scale": ("", "what this step's learning rate was multiplied by (optimizer.ess_reference); 1: not at all"),
    "optimizer_step": ("steps", "how often the optimizer has stepped; behind `step` where no prompt survived"),
    "micro_batches": ("micro-batches", "micro-batches that the gradient was summed over"),
    "row_use": ("share", "positions of the packed rows that hold tokens; the rest is padding"),
    "entropy": ("nats", "entropy of the policy where a loss token was sampled, mean"),
    "clipped": ("share", "loss tokens whose importance ratio the loss clips, or caps with CISPO"),
    "masked": ("share", "loss tokens that a mask took out (IcePop, DPPO, CPPO)"),
    "reference_kl": ("nats", "KL to the policy the run began with, k3 estimate per loss token; "
                     "only with objective.reference_kl"),
}  # fmt: skip
DISTILLATION: Names = {
    "teacher_kl": ("nats", "generator's log-prob - teacher's, mean over the loss tokens that a teacher scored: the k1 "
                   "estimate of the policy's KL to it; only with objective.distill"),
    "teacher_divergence": ("nats", "what objective.distill=topk_forward or student_topk minimizes, mean over the loss "
                           "tokens with ids of the teacher"),
    "teacher_tail": ("share", "probability that the teacher gives to tokens other than these ids, mean likewise"),
}  # fmt: skip
OFF_POLICY: Names = {
    "mismatch": ("nats", "|trainer's log-prob - generator's| of a loss token, mean, staleness included"),
    "mismatch_p99": ("nats", "99th percentile of that difference"),
    "mismatch_max": ("nats", "the largest difference"),
    "other_bits": ("share", "of loss tokens whose two log-probs are not the same to the bit; numerics=bitwise: of old "
                   "tokens only"),
    "kl": ("nats", "KL of the generators' policy to the trainer's, k3 estimate per loss token"),
    "ratio": ("", "importance ratio exp(trainer's log-prob - generator's), mean over loss tokens; near 1"),
    "ratio_max": ("", "the largest importance ratio"),
    "effective_sample_size": ("share", "Kish's effective sample size of the tokens' importance ratios"),
    "effective_sample_size_sequence": ("share", "likewise of completions, each weighing the product of its ratios; "
                                       "falls with the length"),
    "effective_sample_size_geometric": ("share", "likewise of completions, each weighing the geometric mean of its "
                                        "ratios"),
}  # fmt: skip
TIME: Names = {
    "waited_seconds": ("seconds", "how long the trainer waited for the fleet before this step"),
    "waited_for": ("seconds", "pairs (who held it up, for how long), the longest first; a list"),
    "update_seconds": ("seconds", "how long the trainer computed this step"),
    "cpu_seconds": ("core-seconds", "how long cores worked for the trainer's process since the row before, added up"),
    "group_seconds": ("seconds", "from asking for a group to its last completion, mean over the batch"),
}
SERVERS: Names = {
    "servers/*/completions": ("completions", "completions of that server that were scored for this step"),
    "servers/*/tokens": ("tokens", "their sampled tokens"),
    "servers/*/mismatch": ("nats", "|trainer's log-prob - this server's|, mean over these tokens"),
    "servers/*/ratio": ("", "mean importance ratio of these tokens; an honest server is near 1"),
    "servers/*/effective_sample_size": ("share", "Kish's effective sample size of these tokens' importance ratios"),
    "parity/scored": ("completions", "completions scored for the comparison alone, beside those trained on"),
    "parity/scored_tokens": ("tokens", "their tokens, prompts included"),
    "parity/taken_back": ("completions", "completions that were not trusted, and asked for again elsewhere"),
    "parity/sent_away": ("servers", "servers sent away, since their log-probs were not the policy's"),
    "parity/probed": ("servers", "servers compared once more by completions sampled for it (parity.every)"),
    "parity/seconds": ("seconds", "time spent on judging"),
}
TEACHERS: Names = {
    "teachers/*/sequences": ("sequences", "branches of completions that the teacher scored for later steps"),
    "teachers/*/tokens": ("tokens", "their tokens, prompts included"),
    "teachers/*/tokens_per_second": ("tokens per second", "these tokens over the time since the row before"),
    "teachers/*/seconds": ("seconds", "from asking to the answer, mean over sequences"),
    "teachers/*/cached": ("sequences", "sequences that had been scored before, and were not asked for"),
    "teachers/*/asked_again": ("sequences", "sequences asked of another server, since one failed"),
    "teachers/*/sent_away": ("servers", "servers sent away, since they did not tell the teacher's log-probs"),
}
WEIGHTS: Names = {
    "pushes/applied": ("pushes", "pushes that ended with a server applying the version"),
    "pushes/sparse": ("pushes", "those of them that sent a delta"),
    "pushes/payload_bytes": ("bytes", "size of what these pushes sent"),
    "pushes/resent_chunks": ("chunks", "chunks sent again after a wrong checksum"),
    "pushes/seconds": ("seconds", "from the start of a push until it is applied, summed over pushes"),
    "pushes/transfer_seconds": ("seconds", "the part from the header to the last good chunk"),
    "pushes/staging_seconds": ("seconds", "the part in which the server unpacks and checks, while it goes on decoding"),
    "pushes/pause_seconds": ("seconds", "the part in which the server's decoding stands still"),
    "pushes/deltas": ("versions", "versions that were compared with the one before them"),
    "pushes/delta_bytes": ("bytes", "size of these deltas"),
    "pushes/dense_bytes": ("bytes", "size of these versions in full"),
    "pushes/changed": ("weights", "weights whose bits changed in these versions"),
    "pushes/elements": ("weights", "weights that were compared"),
    "pushes/whole_tensors": ("tensors", "tensors sent whole, since too much of them changed (fleet.max_delta_density)"),
    "pushes/encode_seconds": ("seconds", "time for comparing, bringing to the host and encoding these deltas"),
}
EXPERTS: Names = {
    "expert_load": ("", "tokens of the fullest expert over the mean of a layer's experts, mean over layers; 1: even"),
    "expert_load_max": ("", "the largest load of a layer"),
    "expert_load_by_layer": ("", "the load of each layer; a list"),
    "experts_unused": ("share", "experts that got no token"),
    "experts_moved": ("share", "pairs (token, expert) of router replay that the trainer's router would not have made"),
    "expert_tokens": (
        "tokens",
        "tokens of each expert, a list for each layer; left out for models with over 4,096 experts in all",
    ),
}
_FORECAST: Names = {
    "step": ("steps", "step of the latest evaluation that the fit has seen"),
    "asymptote": ("share", "A of the fitted sigmoid: the pass rate it rises to"),
    "asymptote_low": ("share", "lower end of A's 95 % interval"),
    "asymptote_high": ("share", "upper end of A's 95 % interval"),
    "exponent": ("", "B of the fitted sigmoid: how steeply it rises"),
    "midpoint": ("typical device-hours", "C_mid of the fitted sigmoid: where half of the gain is made"),
    "identified": ("0 or 1", "whether the evaluations tell A"),
    "next_low": ("share", "lower end of the 90 % band for the next evaluation"),
    "end_compute": ("typical device-hours", "compute at the last step"),
    "end_device_hours": ("device-hours", "what that costs at the rate of the run so far; left out where not known"),
    "end_score": ("share", "forecast pass rate of the evaluation there, by all laws averaged"),
    "end_low": ("share", "lower end of its 90 % band"),
    "end_high": ("share", "upper end of its 90 % band"),
    "gain": ("share", "what the rest of the run is expected to add to the pass rate"),
    "gain_low": ("share", "lower end of its 90 % interval"),
    "gain_high": ("share", "upper end of its 90 % interval"),
    "go_on": ("0 or 1", "whether the rest may gain 0.02 or more"),
    "pays_until": ("typical device-hours", "from where on twice the compute gains less than 0.02, most likely; "
                   "left out where that is not in sight"),
    "pays_until_step": ("steps", "the step at that compute"),
    "weight_*": ("share", "weight of each law in the average: sigmoid, richards, logistic, power, "
                 "random_walk"),
}  # fmt: skip
FORECAST: Names = {
    **{f"forecast/{key}": said for key, said in _FORECAST.items()},
    "forecasts/*/*": ("", "the same keys for each environment of a mixture"),
}
LEDGER_COLUMNS: Names = {
    "device_hours": ("device-hours", "trainer and generators, busy and idle: what the run costs"),
    "trainer_busy_hours": ("device-hours", "the trainer computed updates"),
    "trainer_idle_hours": ("device-hours", "the trainer waited"),
    "trainer_evaluation_hours": ("device-hours", "the trainer waited since all servers evaluated; not in device_hours"),
    "trainer_setup_hours": ("device-hours", "loading, compiling, meeting servers; not in device_hours"),
    "trainer_stalled_hours": ("device-hours", "held up by a save, no server or a stopped process; not in device_hours"),
    "generator_busy_hours": ("device-hours", "generators sampled for training"),
    "generator_idle_hours": ("device-hours", "generators had nothing to sample"),
    "generator_evaluation_hours": ("device-hours", "generators evaluated; not in device_hours"),
    "generator_setup_hours": ("device-hours", "generators before training began; not in device_hours"),
    "generator_stalled_hours": ("device-hours", "generators were idle while the trainer stalled; not in device_hours"),
    "teacher_hours": ("device-hours", "teachers' servers while training goes on; not in device_hours"),
    "model_flops": ("FLOPs", "trainer_flops + generator_flops"),
    "trainer_flops": ("FLOPs", "updates, by formula: forward and backward pass"),
    "generator_flops": ("FLOPs", "sampling for training, by formula"),
    "evaluation_flops": ("FLOPs", "sampling for evaluations; not in model_flops"),
    "setup_flops": ("FLOPs", "sampling before training began; not in model_flops"),
    "trained_tokens": ("tokens", "tokens trained on, prompts included"),
    "sampled_tokens": ("tokens", "tokens sampled for training, forced ones not included"),
    "evaluation_tokens": ("tokens", "tokens sampled for evaluations, forced ones not included"),
}
COMPUTE: Names = {f"compute/{key}": said for key, said in LEDGER_COLUMNS.items()}
WARM_START: Names = {
    "loss": ("nats", "mean negative log-likelihood of the tokens learned"),
    "gradient_norm": ("", "global norm of the gradient"),
    "row_use": ("share", "positions of the packed rows that hold tokens"),
    "examples": ("traces", "traces in the step"),
    "tokens": ("tokens", "tokens learned in the step"),
    "evaluation_loss": ("nats", "mean negative log-likelihood of held-out traces (sft.evaluation_traces)"),
}

_RATES: Names = {
    "prompts": ("prompts", "prompts evaluated"),
    "samples": ("completions", "completions of each prompt"),
    "pass_rate": ("share", "mean@n: mean over prompts of the share of correct completions"),
    "pass_rate_low": ("share", "lower end of its 95 % interval over prompts"),
    "pass_rate_high": ("share", "upper end of its 95 % interval over prompts"),
    "passes": ("completions", "correct completions of each prompt, in the order of the prompts; a list"),
    "pass_at/*": ("share", "unbiased pass@k, with the ends of its 95 % interval; a list of three"),
    "majority_at/*": ("share", "majority@k, likewise; none where no completion names an answer"),
    "reward": ("reward", "mean over completions"),
    "truncated": ("share", "completions cut by their token budget"),
    "interrupted": ("share", "completions whose thinking was ended by the interruption text"),
    "length_mean": ("tokens", "sampled tokens of a completion, mean"),
    "length_max": ("tokens", "sampled tokens of the longest completion"),
    "score/*": ("", "mean of a metric that the score gave, as in metrics.jsonl"),
}
EVALUATION: Names = {
    "step": ("steps", "step of the policy that was evaluated"),
    "version": ("steps", "the same, as a version of the weights"),
    "time": ("unix seconds", "when the row was written"),
    "incarnation": ("", "number of the trainer process that wrote it"),
    "seconds": ("seconds", "from asking for the evaluation to its last score"),
    "key": ("", "scalerl-eval: stands for the weights, the prompts and your code; others start the evaluation over"),
    **_RATES,
    "tasks/*/prompts": ("prompts", "prompts of one task; only where they name several"),
    "tasks/*/pass_rate": ("share", "pass rate of one task"),
    "environments/*/*": ("", "the keys above for each environment of a mixture, from prompts to score/*"),
}
LEDGER_FILE: Names = {
    "seconds/*": ("device-seconds", "trainer and generators, each by busy, idle, evaluation, setup and stalled"),
    "trainer/flops": ("FLOPs", "updates"),
    "trainer/tokens": ("tokens", "tokens trained on, prompts included"),
    "sampled/*": ("tokens", "tokens sampled, by training, evaluation and setup"),
    "decoded/*": ("tokens", "tokens sampled or forced, each of which passes the model once"),
    "prefilled/*": ("tokens", "tokens of prompts fed"),
    "estimated/*": ("FLOPs", "generators, by formula; never falls"),
    "recovered/*": ("FLOPs", "generators, spent before this file was repaired from the rows"),
    "finished/*": ("tokens, positions", "sums over finished completions: tokens, positions they attended to, prompt "
                   "tokens, positions of the prefill; a list"),
    "servers/*": ("", "last counters of each server process: devices, seconds up, seconds busy, sampled, forced and "
                  "prompt tokens; a list"),
    "heard/*": ("unix seconds", "when each server process last told its status"),
}  # fmt: skip

# What each file holds, by section.
METRICS: dict[str, Names] = {
    "The row": ROW,
    "The batch": BATCH,
    "Staleness": STALENESS,
    "The update": UPDATE,
    "Distillation": DISTILLATION,
    "Trainer against generators": OFF_POLICY,
    "Where the time went": TIME,
    "Servers and log-prob parity": SERVERS,
    "Teachers": TEACHERS,
    "Weights sent": WEIGHTS,
    "Experts": EXPERTS,
    "The live forecast": FORECAST,
    "Compute so far": COMPUTE,
}
EVALS: dict[str, Names] = {"The evaluation": EVALUATION, "Compute when it was asked for": LEDGER_COLUMNS}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a row, nested ones joined by "/"; an empty mapping has none."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key


def unexplained(row: Mapping[str, Any], *tables: Names) -> list[str]:
    """The keys of a row that no table has."""
    patterns = [re.escape(key).replace(r"\*", ".+") for table in tables for key in table]
    known = re.compile("|".join(patterns))
    return [key for key in flat(row) if not known.fullmatch(key)]
