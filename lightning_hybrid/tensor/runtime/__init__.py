"""Runs layers that are sharded over tensor ranks."""
