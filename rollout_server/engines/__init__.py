"""Engines that sample completions: jax (embedded), replay (recorded or scripted)."""
