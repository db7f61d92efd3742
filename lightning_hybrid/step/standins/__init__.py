"""Stand-ins for tensors and numbers that are not on this rank, and how kernels run on them."""
