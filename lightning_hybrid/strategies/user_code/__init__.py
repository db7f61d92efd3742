"""Hooks, optimizers, loaders and checkpoints of the user."""
