"""Tensor parallelism inside one unit: a plan is found, tried and proved, and then applied around the unit's forward."""
