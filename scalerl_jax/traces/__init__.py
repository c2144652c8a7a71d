"""What the warm start learns from: traces, each a prompt and the pieces of what follows it."""
