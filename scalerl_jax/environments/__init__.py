"""Tasks: where prompts come from, the order they are drawn in, and what an answer is worth."""
