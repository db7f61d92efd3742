"""Activation checkpointing: layers that are recomputed in full, but for chosen results, or as a budget needs it."""
