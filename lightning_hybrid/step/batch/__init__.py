"""Split a batch into microbatches, and merge what they gave."""
