"""One process that runs what all ranks of a layout run: the reference of a comparison."""
