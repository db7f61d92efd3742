"""Attention without torch's fused inference kernels, in recordings and in trials: `slow_attention`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Users:
    """How many blocks of any thread are inside, and whether the kernels were enabled before the first."""

    lock = threading.Lock()
    number, was_enabled = 0, True


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Disable the fused inference kernels of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``.

    These cannot be recorded: with attention weights requested or under autocast their results on stand-ins differ from
    those of a run, and an encoder reads the content of its mask and passes nested tensors between its layers. They also
    take numbers in masks for true and false. Torch has one switch for all threads; the last block that ends sets it
    back.
    """
    with _Users.lock:
        if not _Users.number:
            _Users.was_enabled = torch.backends.mha.get_fastpath_enabled()
        _Users.number += 1
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _Users.lock:
            _Users.number -= 1
            if not _Users.number:
                torch.backends.mha.set_fastpath_enabled(_Users.was_enabled)
