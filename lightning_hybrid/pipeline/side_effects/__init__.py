"""What microbatches leave on modules becomes what the batch leaves."""
