"""Expert parallelism: detection of experts in a module, and their shards on ranks."""
