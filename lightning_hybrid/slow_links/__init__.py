"""Slow links between replicas: sums of gradients over ranks, sent in compressed form."""
