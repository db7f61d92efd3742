"""Gradient hooks with a flag that tells whether a call would do nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class GradientHook:
    """A hook for ``register_post_accumulate_grad_hook`` that most backwards of a step may skip."""

    def __init__(self, call: Callable[[Tensor], None], is_idle: Callable[[], bool]) -> None:
        """Take ``call`` (called with the parameter), ``is_idle`` (tells whether a call would do nothing now)."""
        self._call, self._is_idle = call, is_idle

    def __call__(self, parameter: Tensor) -> None:
        """Handle a new gradient of the parameter, of the shape that this rank has."""
        with torch._C.DisableTorchFunctionSubclass():
            self._call(parameter)

    def register(self, parameter: Tensor) -> RemovableHandle:
        """Register on a parameter of any shape: the hook gets the shard's gradient, and those of users a full one."""
        with torch._C.DisableTorchFunction():
            return parameter.register_post_accumulate_grad_hook(self)

    @property
    def is_idle(self) -> bool:
        """Whether a call would do nothing now, so that the gradient may be accumulated later."""
        return self._is_idle()
