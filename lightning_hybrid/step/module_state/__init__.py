"""What modules hold; snapshot and restore."""
