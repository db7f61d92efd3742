"""What ranks do with the memory that they share is nothing of the step's."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class hidden(AbstractContextManager[None]):
    """No mode sees the operations inside.

    Activation checkpointing would note them as if they could be repeated: they read memory that other ranks write to.
    """

    def __enter__(self) -> None:
        self._disabled = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
        for each in self._disabled:
            each.__enter__()

    def __exit__(self, *_: object) -> None:
        for each in reversed(self._disabled):
            each.__exit__(None, None, None)
