"""Weights of the losses of microbatches in the loss of the batch."""
