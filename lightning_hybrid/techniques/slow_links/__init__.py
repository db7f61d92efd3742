"""Slow links between replicas: compressed gradients, and rounds of local steps."""
