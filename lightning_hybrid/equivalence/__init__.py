"""Whether a copy of a layer is the same function."""
