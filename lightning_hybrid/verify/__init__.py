"""Verification that training under a layout matches single-process training; reports the first value that differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_hybrid.namespace import late_names
from lightning_hybrid.verify.layouts import LAYOUTS, Layout, parse_layout

if TYPE_CHECKING:
    from lightning_hybrid.verify.experiment import Experiment
    from lightning_hybrid.verify.verification import Report, Verification, table, verify

__all__ = ["LAYOUTS", "Experiment", "Layout", "Report", "Verification", "parse_layout", "table", "verify"]

# These import torch and Lightning.
_VERIFICATION = dict.fromkeys(("Report", "Verification", "table", "verify"), "verify.verification")
__getattr__ = late_names(__name__, {"Experiment": "verify.experiment", **_VERIFICATION})
