"""Mistakes that a person makes, one text of the source for another, and the test that finds each.

A fault changes what the program does: a sign, a bound, a check that is left out. `old` occurs once in its file, which a
quick test holds true. Where a change of the source breaks a fault, mend its `old`, or write another of the kind.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    test: str  # what finds it, FILE::TEST
    target: str = "test"  # of the Makefile, which runs that test: test | test-full


OBJECTIVE, LEARNER = "scalerl_jax/objective", "scalerl_jax/learner"
MODEL, ENGINES = "scalerl_jax/model", "rollout_server/engines"
CONTRACT, ROLLOUTS = "scalerl_jax/contract", "scalerl_jax/rollouts"

FAULTS = (
    # ---- The objective
    Fault(
        "the sign of the loss",
        f"{OBJECTIVE}/losses.py",
        "loss = -jnp.sum(jnp.where(keep, weights * maximized, 0.0))",
        "loss = jnp.sum(jnp.where(keep, weights * maximized, 0.0))",
        "tests/objective/test_losses.py::test_equal_the_formulas",
    ),
    Fault(
        "CISPO differentiates its ratio",
        f"{OBJECTIVE}/losses.py",
        "ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))",
        "ratio = jnp.exp(log_ratio)",
        "tests/objective/test_losses.py::test_equal_the_formulas",
    ),
    Fault(
        "GSPO without length normalization",
        f"{OBJECTIVE}/losses.py",
        "jnp.exp(total(log_ratio, segment_ids) / jnp.maximum(count, 1.0))",
        "jnp.exp(total(log_ratio, segment_ids))",
        "tests/objective/test_losses.py::test_equal_the_formulas",
    ),
    Fault(
        "advantages over the standard deviation of all rewards",
        f"{OBJECTIVE}/advantages.py",
        "scale = np.sqrt((centred**2).sum() / kept.sum())",
        "scale = rewards[kept].std()",
        "tests/objective/test_advantages.py::test_equal_the_formulas",
    ),
    Fault(
        "a prompt's tokens weighed completion by completion",
        f"{OBJECTIVE}/advantages.py",
        "share = prompts * tokens.sum(axis=1, keepdims=True) * np.ones_like(tokens)",
        "share = prompts * kept.sum(axis=1, keepdims=True) * tokens",
        "tests/objective/test_token_weights.py::test_equal_the_averages",
    ),
    # ---- The trainer
    Fault(
        "truncated completions count",
        f"{LEARNER}/batch.py",
        'if objective.truncated == "penalize" else ~truncated',
        'if objective.truncated != "penalize" else ~truncated',
        "tests/learner/test_batch.py::test_excluded_completions_leave_mean_scale_weights_and_group",
    ),
    Fault(
        "a micro-batch's gradient takes the place of those before",
        f"{LEARNER}/trainer.py",
        "grads = jax.tree.map(jnp.add, grads, new)",
        "grads = new",
        "tests/learner/test_reference_policy.py::test_packing_and_micro_batches_have_no_part",
    ),
    Fault(
        "the warm-up is off by one",
        f"{LEARNER}/optimizer.py",
        "(steps + 1) / max(1, config.warmup_steps)",
        "steps / max(1, config.warmup_steps)",
        "tests/learner/test_optimizer.py::test_equal_adamw_after_every_step",
    ),
    Fault(
        "weights are compared as numbers, not as bits",
        f"{LEARNER}/weight_snapshots.py",
        "(bits != before).reshape(-1)",
        "(bits.view(jnp.bfloat16) != before.view(jnp.bfloat16)).reshape(-1)",
        "tests/learner/test_weight_snapshots.py::test_what_changed_is_what_numpy_finds",
    ),
    # ---- The model
    Fault(
        "attention reaches into other segments",
        f"{MODEL}/attention/blocks.py",
        "(query_segment[..., :, None] == key_segment[..., None, :]) & causal",
        "(query_segment[..., :, None] >= key_segment[..., None, :]) & causal",
        "tests/model/test_attention.py::test_equals_the_plain_formula",
    ),
    Fault(
        "logits are rounded to bfloat16",
        f"{MODEL}/head.py",
        'if precision.head == "bfloat16" else logits',
        'if precision.head != "highest" else logits',
        "tests/model/test_head.py::test_values_entropy_and_gradient_whatever_the_chunk",
    ),
    Fault(
        "rotary positions turn the other way",
        f"{MODEL}/decoder.py",
        "[first * cos - second * sin, second * cos + first * sin]",
        "[first * cos + second * sin, second * cos - first * sin]",
        "tests/model/test_transformers.py::test_packed_rows_have_the_logits_and_gradients_of_separate_sequences",
    ),
    Fault(
        "bfloat16 in files is read as float16",
        f"{MODEL}/safetensors_folder.py",
        '"BF16": ml_dtypes.bfloat16',
        '"BF16": np.float16',
        "tests/model/test_hf.py::test_untouched_weights_survive_to_the_bit",
    ),
    # ---- The generator
    Fault(
        "a prefix is kept over a swap of the weights",
        f"{ENGINES}/jax/engine.py",
        "self._weights, self._prefix = weights, None",
        "self._weights = weights",
        "tests/rollout_server/engines/test_jax_engine.py::test_one_prefill_per_group_and_version",
    ),
    Fault(
        "the temperature is applied twice",
        f"{ENGINES}/jax/sampling.py",
        "weight = jnp.pad(jnp.exp(logits), ",
        "weight = jnp.pad(jnp.exp(logits / temperature[:, None]), ",
        "tests/rollout_server/engines/test_jax_sampling.py::test_frequencies_and_logprobs",
    ),
    Fault(
        "the thinking budget is off by one",
        f"{ENGINES}/thinking_budget.py",
        "if ended or self._left == 0:",
        "if ended or self._left <= 1:",
        "tests/rollout_server/engines/test_thinking_budget.py::test_each_token_is_judged_as_the_whole_completion_is",
    ),
    Fault(
        "the digest of a delta is not compared",
        "rollout_server/weight_store.py",
        "if digest(self._view(name)) != wanted:",
        "if digest(self._view(name)) is None:",
        "tests/rollout_server/test_weight_parts.py::test_parts_that_do_not_go_together_change_nothing",
    ),
    Fault(
        "the version that a delta starts from is not compared",
        "rollout_server/weight_store.py",
        "if self.held != base:",
        "if self.held is None:",
        "tests/rollout_server/test_weight_store.py::test_a_delta_from_a_version_that_is_not_held_asks_for_a_full_sync",
    ),
    Fault(
        "the checksum of a chunk is not compared",
        "rollout_server/weight_store.py",
        "if crc32(data) != chunk.crc32:",
        "if not chunk.crc32:",
        "tests/rollout_server/test_weight_store.py::test_the_bits_that_arrive_are_those_sent",
    ),
    Fault(
        "a push may take for ever",
        "rollout_server/weight_push.py",
        "if time.monotonic() > until:",
        "if until <= 0:",
        "tests/rollout_server/test_guard.py::test_a_version_that_comes_in_drops_has_an_end",
    ),
    Fault(
        "any token opens the door",
        f"{CONTRACT}/security.py",
        "if len(shown) == 1 and hmac.compare_digest(_digest(shown[0]), self._expected):",
        "if len(shown) == 1:",
        "tests/rollout_server/test_security.py::test_no_call_of_any_service_without_the_token",
    ),
    Fault(
        "forced tokens are loss tokens, and sampled ones are not",
        f"{CONTRACT}/codec.py",
        "mask = np.ones(len(self.token_ids), bool)\n        for start, end in self.forced:\n"
        "            mask[start:end] = False",
        "mask = np.zeros(len(self.token_ids), bool)\n        for start, end in self.forced:\n"
        "            mask[start:end] = True",
        "tests/learner/test_batch.py::test_excluded_completions_leave_mean_scale_weights_and_group",
    ),
    # ---- The fleet
    Fault(
        "tokens may be a step too old",
        f"{ROLLOUTS}/pacing.py",
        "return max(self._start, self.batch(number) - self.k)",
        "return max(self._start, self.batch(number) - self.k - 1)",
        "tests/rollouts/test_pacing.py::test_pipeline_bounds_the_lag_and_loses_nothing_whatever_happens",
    ),
    Fault(
        "what is asked for again has another name",
        f"{ROLLOUTS}/requests.py",
        "group_id, prompt = group.group_id, group.row.token_ids",
        'group_id, prompt = f"{group.group_id}/{group.delivered()}", group.row.token_ids',
        "tests/rollouts/test_requests.py::test_what_is_asked_for_again_has_the_names_that_it_had",
    ),
    Fault(
        "another tokenizer is taken for ours",
        f"{ROLLOUTS}/servers/validate_status.py",
        "if status.tokenizer_fingerprint != expected.tokenizer_fingerprint:",
        "if not status.tokenizer_fingerprint:",
        "tests/rollouts/test_meeting.py::test_another_tokenizer_stops_the_run",
    ),
    Fault(
        "a server is left alone for ever",
        f"{ROLLOUTS}/servers/offences.py",
        "return min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(offences - 1, 20))",
        "return max(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(offences - 1, 20))",
        "tests/rollouts/servers/test_offences.py::test_each_offence_costs_more_until_it_is_sent_away",
    ),
    # ---- Environments
    Fault(
        "a prompt at the threshold is drawn again",
        "scalerl_jax/environments/curriculum.py",
        "solved = int(history.correct[prompt].sum()) >= limit",
        "solved = int(history.correct[prompt].sum()) > limit",
        "tests/environments/test_curriculum.py::test_a_solved_prompt_is_never_drawn_again_and_the_others_all_are",
    ),
    Fault(
        "a checkpoint lacks the place in the prompts",
        "scalerl_jax/environments/curriculum.py",
        '"epochs": place.epochs,',
        '"epochs": np.zeros_like(place.epochs),',
        "tests/environments/test_curriculum.py::test_draws_do_not_depend_on_timing_or_on_restarts",
    ),
    Fault(
        "an answer in another unit is right",
        "scalerl_jax/environments/answers.py",
        "if self.unit and other.unit and self.unit != other.unit and not _degrees(self.unit, other.unit):",
        'if self.unit and other.unit == "%" and self.unit != other.unit:',
        "tests/environments/test_answers.py::test_wrong",
    ),
    Fault(
        "what is not scored in time is right",
        "scalerl_jax/environments/scorer_pool.py",
        "score = Score(-1.0, False, errors, why=why, failed=True)",
        "score = Score(1.0, True, errors, why=why, failed=True)",
        "tests/environments/test_scorer_pool.py::test_an_answer_that_never_ends_is_wrong_and_holds_up_nobody",
    ),
    Fault(
        "the warm start learns the user's turns",
        "scalerl_jax/traces/conversations.py",
        "pieces += [Piece(text[done:start], trained=False), Piece(text[start:stop])]",
        "pieces += [Piece(text[done:start]), Piece(text[start:stop])]",
        "tests/traces/test_conversations.py::test_the_turns_of_the_assistant_are_trained_on",
    ),
    # ---- The run
    Fault(
        "two trainers in one folder",
        "scalerl_jax/run/folder.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "tests/run/test_folder.py::test_two_trainers_cannot_share_a_workdir",
    ),
    Fault(
        "rows past the checkpoint stay",
        "scalerl_jax/run/jsonl.py",
        'kept = [row for row in rows if row["step"] <= step]',
        'kept = [row for row in rows if row["step"] <= step + 1]',
        "tests/run/test_folder.py::test_going_on_cuts_what_is_past_the_checkpoint",
    ),
    Fault(
        "a file is written in its place",
        "scalerl_jax/system/files.py",
        "    beside = temporary(target)\n",
        "    beside = target\n",
        "tests/system/test_files.py::test_a_file_that_has_no_room_is_as_it_was",
    ),
    Fault(
        "evaluations are on the x axis",
        "scalerl_jax/run/ledger.py",
        'row["device_hours"] += row[f"{side}_busy_hours"] + row[f"{side}_idle_hours"]',
        'row["device_hours"] += sum(row[f"{side}_{kind}_hours"] for kind in ("busy", "idle", "evaluation"))',
        "tests/run/test_ledger.py::test_the_trainers_time",
    ),
    Fault(
        "a stall is on the x axis",
        "scalerl_jax/run/ledger.py",
        '(kind == "idle" and not self._serving)',
        "False",
        "tests/run/test_ledger_stalls.py::test_a_stall_is_no_compute",
    ),
    Fault(
        "pass@k with replacement",
        "scalerl_jax/run/pass_rates.py",
        "return -math.expm1(float(np.log1p(-k / np.arange(samples - correct + 1, samples + 1)).sum()))",
        "return 1 - (1 - correct / samples) ** k",
        "tests/run/test_pass_rates.py::test_pass_at_k_is_the_share_of_subsets_with_a_correct_one",
    ),
    Fault(
        "the quantile of one side for an interval of two",
        "scalerl_jax/run/pass_rates.py",
        "stats.t.ppf((1 + _LEVEL) / 2, count - 1)",
        "stats.t.ppf(_LEVEL, count - 1)",
        "tests/run/test_pass_rates.py::test_an_interval_holds_the_mean_of_all_prompts_as_often_as_it_says",
    ),
    # ---- Curves, report, config, launch
    Fault(
        "the report takes markup from data",
        "scalerl_jax/report/page.py",
        'separators=(",", ":")).replace("<", "\\\\u003c")',
        'separators=(",", ":"))',
        "tests/report/test_page.py::test_json_in_a_page_is_json_without_markup",
    ),
    Fault(
        "a group of one is allowed",
        "scalerl_jax/config.py",
        "group_size: Annotated[int, AtLeast(2)] = 16",
        "group_size: int = 16",
        "tests/config/test_config.py::test_no_number_may_be_anything",
    ),
    Fault(
        "generators on Slurm without their token",
        "launch/slurm.py",
        '            f"--token_file={queue.token_file}",\n',
        "",
        "tests/launch/test_slurm.py::test_both_sides_are_given_what_keeps_others_out",
    ),
)
