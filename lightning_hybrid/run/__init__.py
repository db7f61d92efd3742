"""A run under one layout: what it holds, how it is built, and its state in checkpoints."""
