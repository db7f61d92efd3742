"""Experts: layers that send each token to few of many networks, and the ranks that share these."""
