"""Modules, blocks, optimizers and data that several tests use."""
