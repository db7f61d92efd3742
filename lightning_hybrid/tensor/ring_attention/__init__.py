"""Attention of local queries to the keys of all context ranks, which pass them around a ring."""
