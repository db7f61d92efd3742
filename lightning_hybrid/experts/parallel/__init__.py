"""Expert parallelism: detects experts in a module and shards them over ranks."""
