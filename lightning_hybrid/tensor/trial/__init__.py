"""Trials of a plan with threads as ranks, and the proof that it is equivalent to the unsharded layer."""
