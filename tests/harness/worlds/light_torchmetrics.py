"""Loads torchmetrics without what it loads wherever that is installed, which takes longer than to load torch."""

from harness.worlds.not_installed import hidden

with hidden():
    import torchmetrics  # noqa: F401
