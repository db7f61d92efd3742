"""Support for Lightning's two namespaces, `lightning.pytorch` and `pytorch_lightning`, with the classes for each."""
