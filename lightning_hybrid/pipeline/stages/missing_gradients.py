"""Gradients that are None at a stage boundary: sent back as none and not as zeros.

A parameter without a gradient is left alone by an optimizer; with one of zero it decays. What is sent back for such a
value is a NaN with bits that no operation makes. It is looked for in the first batch of each recorded form, and from
then on for the values that had no gradient in that batch: on a GPU each look waits for the message.
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


class NoGradients:
    """Those of one recorded form of a step.

    Attributes:
        is_new: Whether no batch of it has been through its backward.
    """

    def __init__(self) -> None:
        """No batch has run."""
        self.is_new = True
        self._seen: set[Key] = set()

    def sent(self, key: Key, leaf: Tensor) -> Tensor:
        """What is sent back for a value.

        Args:
            key: Of the value.
            leaf: It, after the backward.
        """
        if leaf.grad is not None:
            return leaf.grad
        gradient = torch.zeros_like(leaf)
        if leaf.dtype in _BITS and leaf.numel() and self._is_looked_for(key):
            self._seen.add(key)
            integer, bits = _BITS[leaf.dtype]
            gradient.view(integer).fill_(bits)
        return gradient

    def received(self, key: Key, gradient: Tensor) -> Tensor | None:
        """The gradient of a value; None if it has none.

        Args:
            key: Of the value.
            gradient: What was sent back for it.
        """
        if gradient.dtype not in _BITS or not gradient.numel() or not self._is_looked_for(key):
            return gradient
        integer, bits = _BITS[gradient.dtype]
        if int(gradient.flatten()[:1].view(integer)) != bits:
            return gradient
        self._seen.add(key)
        return None

    def _is_looked_for(self, key: Key) -> bool:
        return self.is_new or key in self._seen
