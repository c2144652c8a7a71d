"""What one update is: packing, the compiled step, the optimizer, checkpoints."""
