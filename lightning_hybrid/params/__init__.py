"""Parameters sharded over several ranks: where each shard is, and how full tensors are sharded and joined."""
