"""The two names of Lightning, `lightning.pytorch` and `pytorch_lightning`, and the classes for each."""
