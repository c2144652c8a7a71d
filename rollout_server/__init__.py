"""One generator process: an engine behind the rollout contract."""
