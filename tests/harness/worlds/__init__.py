"""Ranks that tests run on: how they start, what they are sent, and what is hidden from them."""
