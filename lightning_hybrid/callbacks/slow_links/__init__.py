"""Callbacks for slow links between replicas: compressed gradients, and steps without communication."""
