"""Sums of gradients over ranks, sent in compressed form."""
