"""Missing gradients at a stage boundary: None is sent back as None and not as zeros.

An optimizer skips a parameter without a gradient; with a zero gradient it applies weight decay. For such a value, a
NaN with bits that no operation produces is sent back. Receivers check for it in the first batch of each trace, and
from then on for the values that had no gradient in that batch: on a GPU each check waits for the message.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Key: TypeAlias = tuple[int, int, int]  # the stages that send and receive, and the value
_BITS = {
    torch.float64: (torch.int64, 0x7FF8_5EED_0BAD_5EED),
    torch.float32: (torch.int32, 0x7FC5_EED1),
    torch.bfloat16: (torch.int16, 0x7FED),
    torch.float16: (torch.int16, 0x7EED),
}


class MissingGradients:
    """Encodes and decodes the missing gradients of one trace.

    Attributes:
        is_new: Whether the backward of no batch with this trace has run.
    """

    def __init__(self) -> None:
        """Begin before the first batch."""
        self.is_new = True
        self._missing: set[Key] = set()

    def settle(self) -> None:
        """End the first backward: from now on these values have none."""
        self.is_new = False

    def sent(self, key: Key, leaf: Tensor) -> Tensor:
        """The gradient to send back for a received value, or the encoding of None; of the shape of the value."""
        if leaf.grad is not None:
            return leaf.grad
        gradient = torch.zeros_like(leaf)
        if leaf.dtype in _BITS and leaf.numel() and self._is_checked(key):
            self._missing.add(key)
            integer, bits = _BITS[leaf.dtype]
            gradient.view(integer).fill_(bits)
        return gradient

    def received(self, key: Key, gradient: Tensor) -> Tensor | None:
        """The gradient of a value, of the shape of the one that was received for it; None if the receiver had none."""
        if gradient.dtype not in _BITS or not gradient.numel() or not self._is_checked(key):
            return gradient
        integer, bits = _BITS[gradient.dtype]
        if int(gradient.flatten()[:1].view(integer)) != bits:
            return gradient
        self._missing.add(key)
        return None

    def _is_checked(self, key: Key) -> bool:
        return self.is_new or key in self._missing
