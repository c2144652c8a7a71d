"""Steps of TRL's GRPO trainer with its CISPO loss, timed; trl_peer.py runs this with the Python of TRL's environment.

    python trl_steps.py SPECIFICATION.json

The specification names the model folder, the prompts with their token ids and answers, and the numbers of a step. TRL
is given what makes it fastest here: no reference model, no logging, no checkpoint, one accumulation pass unless
`micro_batch` says otherwise. Its reward compares the text after the thinking with the answer, character by character,
which costs nothing; where there is an `environment`, FILE:CLASS for environment_factory, the reward is that class's.

Printed: one line of JSON with, of each step but the first, the seconds, the tokens behind the prompts (replies of tools
included), the mean turns of a completion, and the share that is right.
"""

import json
import runpy
import sys
import tempfile
import time

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


class Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def prompt_ids(tokenizer, prompt, factory):
    if factory is None:
        return tokenizer(prompt)["input_ids"]
    environment = factory()
    methods = [getattr(environment, name) for name in vars(factory) if not name.startswith("_")]
    tools = [method for method in methods if method.__name__ not in ("reset", "get_reward")]
    return tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=False)


def main(specification):
    with open(specification, encoding="utf-8") as file:
        asked = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    path, _, name = asked["environment"].rpartition(":")
    factory = runpy.run_path(path)[name] if name else None
    if factory is not None:
        tokenizer.response_template = qwen3_template  # of the form in which the model's chat template has calls
    for row in asked["prompts"]:
        ids = prompt_ids(tokenizer, row["prompt"], factory)
        assert ids == row["ids"], f"{row['prompt']!r} is {ids} here and {row['ids']} in our trainer"
    lengths, turns, rewards = [], [], []

    def reward(completions, completion_ids, answer=None, environments=None, **kwargs):
        lengths.append(sum(len(ids) for ids in completion_ids))
        if environments is not None:
            spoken = [sum(message["role"] == "assistant" for message in completion) for completion in completions]
            turns.append(sum(spoken) / len(spoken))
            rewards.append(sum(environment.get_reward() > 0 for environment in environments) / len(environments))
            return [0.0] * len(completions)  # get_reward is asked besides
        right = [text.rpartition("</think>")[2].strip() == wanted for text, wanted in zip(completions, answer)]
        turns.append(1)
        rewards.append(sum(right) / len(right))
        return [1.0 if one else -1.0 for one in right]

    if factory is None:
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
            max_tool_calling_iterations=asked["turns"] - 1,
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
            train_dataset=Dataset.from_list([{k: v for k, v in row.items() if k != "ids"} for row in asked["prompts"]]),
            environment_factory=factory,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:])]
    print(json.dumps({"seconds": seconds, "tokens": lengths[1:], "turns": turns[1:], "right": rewards[1:]}))


if __name__ == "__main__":
    main(sys.argv[1])
