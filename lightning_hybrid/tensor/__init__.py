"""Tensor parallelism inside one unit: a plan is searched, tried and proved, then applied around the unit's forward."""
