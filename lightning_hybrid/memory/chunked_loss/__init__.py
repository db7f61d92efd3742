"""Losses over the vocabulary in chunks of positions: logits are computed, reduced and freed chunk by chunk."""
