"""Gradient hooks with a flag that tells whether a call would do nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class GradientHook:
    """A hook for ``register_post_accumulate_grad_hook`` that most backwards of a step may skip."""

    def __init__(self, call: Callable[[Tensor], None], is_idle: Callable[[], bool]) -> None:
        """Take ``call`` (called with the parameter), ``is_idle`` (tells whether a call would do nothing now)."""
        self._call, self._is_idle = call, is_idle

    def __call__(self, parameter: Tensor) -> None:
        """Handle a new gradient of the parameter."""
        self._call(parameter)

    @property
    def is_idle(self) -> bool:
        """Whether a call would do nothing now, so that the gradient may be accumulated later."""
        return self._is_idle()
