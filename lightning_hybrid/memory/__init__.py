"""Activation checkpointing: full recomputation of layers, and selective recomputation of operations."""
