"""Out-of-memory errors that all ranks survive together: larger batches tried, and training steps repeated."""
