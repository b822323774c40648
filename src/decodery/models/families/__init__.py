"""Configurations and checkpoints of model families."""
