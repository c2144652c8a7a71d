"""Traces, the training data of the warm start: each a prompt and the pieces of text that follow it."""
