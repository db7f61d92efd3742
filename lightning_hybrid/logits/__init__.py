"""Logits that no rank holds in full: sharded by vocabulary, computed in chunks of positions, or both."""
