"""ZeRO: parameters, gradients and optimizer states shared out over the ranks of a shard."""
