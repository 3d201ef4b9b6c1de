"""Checkpoints as others write them: recognised, accounted for, read."""
