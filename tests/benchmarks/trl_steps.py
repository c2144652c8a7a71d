"""Steps of TRL's GRPO trainer with its CISPO loss, timed; bench_step.py runs this with the Python of TRL's environment.

    python trl_steps.py SPECIFICATION.json

The specification names the model folder, the prompts as text with their token ids and answers, and the numbers of a
step. TRL is given what makes it fastest here: no reference model, no logging, no checkpoint, one accumulation pass
unless `micro_batch` says otherwise. Its reward compares the text after the thinking with the answer, character by
character, which costs nothing. Printed: one line of JSON with the seconds of each step and the tokens sampled in it.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def main(path):
    with open(path, encoding="utf-8") as file:
        asked = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    for row in asked["prompts"]:
        ids = tokenizer(row["prompt"])["input_ids"]
        assert ids == row["ids"], f"{row['prompt']!r} is {ids} here and {row['ids']} in our trainer"
    lengths, rewards = [], []

    def reward(completions, completion_ids, answer, **kwargs):
        lengths.append(sum(len(ids) for ids in completion_ids))
        right = [text.rpartition("</think>")[2].strip() == wanted for text, wanted in zip(completions, answer)]
        rewards.append(sum(right) / len(right))
        return [1.0 if one else -1.0 for one in right]

    # A completion's text keeps <think>, which is a special token, so that the answer can be told from the thinking.
    decode = tokenizer.batch_decode
    tokenizer.batch_decode = lambda ids, skip_special_tokens=False, **kwargs: [
        text.replace(tokenizer.eos_token, "") for text in decode(ids, skip_special_tokens=False, **kwargs)
    ]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            loss_type="cispo",
            epsilon_high=5.0,
            beta=0.0,
            scale_rewards="batch",
            num_generations=asked["group_size"],
            per_device_train_batch_size=asked["micro_batch"],
            gradient_accumulation_steps=asked["completions"] // asked["micro_batch"],
            max_completion_length=asked["longest"],
            max_steps=asked["steps"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=asked["learning_rate"],
            weight_decay=0.01,
            lr_scheduler_type="constant",
            use_transformers_continuous_batching=asked["continuous"],
            cache_implementation=asked["cache"],
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=asked["model"],
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list([{k: row[k] for k in ("prompt", "answer")} for row in asked["prompts"]]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:])]
    print(json.dumps({"seconds": seconds, "tokens": lengths[1:], "right": rewards[1:], "torch": torch.__version__}))


if __name__ == "__main__":
    main(sys.argv[1])
