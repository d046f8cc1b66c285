"""The training step, the loop around it, checkpoints and records."""
