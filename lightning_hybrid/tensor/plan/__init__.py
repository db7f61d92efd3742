"""Tensor plans: how the layers of a model are sharded over tensor ranks, as plain data."""
