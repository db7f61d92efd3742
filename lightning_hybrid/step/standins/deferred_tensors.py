"""Deferred tensors: content joined from several ranks only when it is asked for.

Such a tensor is handed to the user's code; what leaves the run of a step (sent to another stage, returned, kept on the
module, given to a metric) is the whole.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call


class Deferred(Tensor):
    """A tensor that is whole to all who ask it, and of which this rank holds a part."""

    @abstractmethod
    def whole(self) -> Tensor:
        """The plain whole tensor, differentiable; collective over the ranks that hold its parts."""


def whole_of(value: Any) -> Any:
    """The whole of a deferred tensor; anything else is handed back."""
    return value.whole() if isinstance(value, Deferred) else value


def with_wholes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the wholes of deferred tensors."""
    leaves, plain = flatten_call(args, kwargs)
    if not any(isinstance(leaf, Deferred) for leaf in leaves):
        return args, kwargs
    return rebuild_call([whole_of(leaf) for leaf in leaves], args, kwargs, plain)
