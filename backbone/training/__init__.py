"""Packing, schedule, checkpoints and the training loop."""
