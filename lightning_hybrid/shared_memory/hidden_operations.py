"""Operations on shared memory that no torch mode sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """No mode sees the operations inside.

    Activation checkpointing would note them as if they could be repeated: they read memory that other ranks write to.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield
