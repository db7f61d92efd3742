"""Test harness: worlds of ranks, fits that are compared, layouts, and verification against one process."""
