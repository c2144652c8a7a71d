"""Products with a calculator: the policy calls a tool, in the form of its own chat template, and answers the result.

    python -m configs.tools                      a model of random weights with a chat template, and chats with calls
    scalerl-sft --config=configs/tools.py ...    then scalerl-train, as docs/tutorials/tools.md has them

Nothing so small multiplies such numbers in its head. In the chats half of the answers are guesses, and so is what comes
behind a call that the calculator cannot read, which is every third one.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from scalerl_jax.config import Config, SftConfig
from scalerl_jax.config_io import load_file
from scalerl_jax.environments.base import Completion, Row
from scalerl_jax.environments.user_code import error_line

SEEDS = {"train": 0, "validation": 1}
MODEL, CHATS = "tiny-model", "chats.jsonl"
TEMPLATE = """\
{%- for tool in tools or [] %}{{ 'tool: ' ~ tool.function.name ~ '\\n' }}{% endfor %}
{%- for message in messages %}
    {{- message.role ~ ': ' ~ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|endoftext|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def calculator(expression: str) -> int:
    """Multiplies.

    Args:
        expression: a product such as 12*34
    """
    if "*" not in expression:
        raise ValueError("no *")
    left, right = expression.split("*")
    return int(left) * int(right)


class Products:
    tools = (calculator,)

    def __init__(self, config: Any):
        self.train_prompts = config.train_prompts

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        rng = random.Random(SEEDS[split])
        for _ in range(self.train_prompts if split == "train" else 300):
            left, right = rng.randint(100, 999), rng.randint(10, 99)
            yield {"prompt": f"{left}x{right}", "answer": left * right}

    def score(self, row: Row, completion: Completion) -> bool:
        return completion.strip() == row.answer


def chat(rng: random.Random) -> list[dict[str, Any]]:
    left, right, answer = rng.randint(100, 999), rng.randint(10, 99), str(rng.randint(1000, 98_901))
    said: list[dict[str, Any]] = [{"role": "user", "content": f"{left}x{right}"}]
    if rng.random() < 0.5:
        expression = f"{left}{rng.choice('**x')}{right}"
        try:
            result = answer = str(calculator(expression))
        except ValueError as error:
            result = f"error: {error_line(error)}"
        call = {"function": {"name": "calculator", "arguments": {"expression": expression}}}
        said += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]
    return [*said, {"role": "assistant", "content": answer}]


def write() -> None:
    """The folder MODEL and the file CHATS."""
    import jax

    from scalerl_jax.environments.tokenizer import make_tokenizer
    from scalerl_jax.environments.tools import schema_of
    from scalerl_jax.model.decoder import init_params
    from scalerl_jax.model.decoder_config import SIZES, DecoderConfig
    from scalerl_jax.model.hf_folder import write_model_folder

    rng = random.Random(2)
    rows = [{"messages": chat(rng), "tools": [schema_of(calculator)]} for _ in range(3000)]
    with open(CHATS, "w") as chats:
        chats.writelines(json.dumps(row) + "\n" for row in rows)
    sizes = {name: getattr(SftConfig(), name) for name in SIZES}
    tokenizer = make_tokenizer(corpus=map(json.dumps, rows), path="tokenizer", vocabulary=sizes["vocab_size"])
    with open("tokenizer/chat_template.jinja", "w") as template:
        template.write(TEMPLATE)
    decoder = DecoderConfig(**sizes, tied_embeddings=True, stop_token_ids=tokenizer.stop_ids)
    params = init_params(decoder, jax.random.key(0))
    write_model_folder(MODEL, params=params, decoder=decoder, tokenizer_dir="tokenizer")


def get_config() -> Config:
    config = load_file("configs/quickstart.py")
    config.max_steps = 40
    config.model.path = "warm-start/model"

    config.environment.name = "configs/tools.py:Products"
    config.environment.train_prompts = 2000
    config.sft.model_path = MODEL
    config.sft.traces = CHATS
    config.sft.max_steps = 300

    config.rollout.max_turns = 3
    config.rollout.max_episode_tokens = 160
    config.rollout.max_prompt_tokens = 32
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.answer_budget = 48

    config.rollout.prompts_per_step = 16
    config.optimizer.learning_rate = 3e-4
    config.evaluation.prompts = 64
    config.evaluation.samples = 4
    return config


if __name__ == "__main__":
    write()
