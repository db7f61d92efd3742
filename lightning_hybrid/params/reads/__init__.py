"""Full parameters and gradients for user code outside layers, though each rank has only some of them or shards."""
