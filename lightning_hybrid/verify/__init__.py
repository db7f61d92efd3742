"""Verification that training under a layout matches single-process training; reports the first value that differs."""

from __future__ import annotations

from lightning_hybrid.verify.experiment import Experiment
from lightning_hybrid.verify.layouts import LAYOUTS, Layout, parse_layout
from lightning_hybrid.verify.verification import Report, Verification, table, verify

__all__ = ["LAYOUTS", "Experiment", "Layout", "Report", "Verification", "parse_layout", "table", "verify"]
