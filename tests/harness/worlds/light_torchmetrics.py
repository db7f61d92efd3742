"""Imports torchmetrics without its optional dependencies, whose import takes longer than torch's."""

from harness.worlds.hidden_packages import hidden

with hidden():
    import torchmetrics  # noqa: F401
