"""What means, sums and metrics over microbatches are for the whole batch."""
