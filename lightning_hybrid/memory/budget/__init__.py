"""Activation checkpointing by a budget: the peak of a rank stays under a number of bytes, at the least recomputation.

A training batch at the floor is recorded (`step_profile`): when layers ran, and how much was alive. From that follows
what each layer would keep under other choices (`layer_structure`, `resident_bytes`). `kept_results` makes choices for
a layer, `layer_choices` takes one for each layer, both by integer programs, and `budgeted_layers` runs later batches.
"""
