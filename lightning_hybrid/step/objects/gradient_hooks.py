"""Gradient hooks that say when they need not be called."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class GradientHook:
    """A hook for ``register_post_accumulate_grad_hook``, of which most backwards of a step may take no notice."""

    def __init__(self, call: Callable[[Tensor], None], is_idle: Callable[[], bool]) -> None:
        """Args: call: told of the parameter. is_idle: whether it would do nothing now."""
        self._call, self._is_idle = call, is_idle

    def __call__(self, parameter: Tensor) -> None:
        """The parameter has a new gradient."""
        self._call(parameter)

    @property
    def is_idle(self) -> bool:
        """Whether it would do nothing now, so that the gradient may as well come later."""
        return self._is_idle()
