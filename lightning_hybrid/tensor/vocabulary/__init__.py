"""Vocabulary-parallel weights, and losses on logits that are sharded along the vocabulary."""
