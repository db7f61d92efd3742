"""Architectures sampled from transformers, each built tiny by rules for the names of its sizes."""
