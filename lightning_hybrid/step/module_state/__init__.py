"""The state of modules: snapshots, attribute tensors, pickles of parameters."""
