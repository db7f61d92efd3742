"""Split a batch into microbatches, and merge their outputs."""
