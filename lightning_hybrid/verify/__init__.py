"""Whether a module trains under a layout to the numbers of one process; the first value that differs."""

from __future__ import annotations

from lightning_hybrid.verify.check import Verification, verify
from lightning_hybrid.verify.layouts import LAYOUTS, Layout, parse_layout
from lightning_hybrid.verify.report import Report, table
from lightning_hybrid.verify.run import Experiment

__all__ = ["LAYOUTS", "Experiment", "Layout", "Report", "Verification", "parse_layout", "table", "verify"]
