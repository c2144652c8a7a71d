"""The parts of an update: packing, the compiled step, the optimizer, checkpoints."""
