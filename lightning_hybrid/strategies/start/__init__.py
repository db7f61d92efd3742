"""Preparation of a run, from setup to the first batch."""
