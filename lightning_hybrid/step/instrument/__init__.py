"""Patches of torch and of the user's modules while a step runs."""
