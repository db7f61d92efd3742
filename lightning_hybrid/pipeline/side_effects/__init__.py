"""Side effects of microbatches on modules, joined to those of the batch."""
