"""A fleet in simulated time: how many generators keep a trainer busy, and how stale their tokens are."""
