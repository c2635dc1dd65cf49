"""Checkpoints to parameters: where a model's name leads, and how its files are read."""
