"""Optimizer steps on sharded and offloaded states."""
