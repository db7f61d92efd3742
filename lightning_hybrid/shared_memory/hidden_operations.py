"""A context that hides operations on shared memory from torch's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Context in which no dispatch or function mode sees operations.

    Activation checkpointing would record them for recomputation, but they read memory that other ranks write to.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield
