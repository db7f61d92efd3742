"""The reference of a comparison: one process that runs the work of all ranks of a layout."""
