"""How the losses of microbatches weigh in that of the batch."""
