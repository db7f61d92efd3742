"""Deferred initialisation: parameters built on the meta device, and their values."""
