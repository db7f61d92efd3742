"""Worlds of ranks for tests: how they start, what they receive, and which packages are hidden from them."""
