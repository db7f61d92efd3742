"""Vocabulary-parallel weights, and losses on logits that are cut by the vocabulary."""
