"""State of sharded layers: marks, local tensors, random numbers, and full parameters for code outside."""
