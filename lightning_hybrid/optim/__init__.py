"""LAMB and LARS, for large batches: trust ratios, of norms that are global where ranks hold shards."""

from lightning_hybrid.optim.lamb import LAMB
from lightning_hybrid.optim.lars import LARS

__all__ = ["LAMB", "LARS"]
