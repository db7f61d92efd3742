"""ZeRO: parameters, gradients and optimizer states sharded over the ranks of a shard group."""
