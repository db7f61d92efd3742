"""Tensors whose content is joined from several ranks only when it is asked for.

Such a tensor is handed to the user's code; what leaves the run of a step (sent to another stage, returned, kept on the
module, given to a metric) is the whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Deferred(Tensor):
    """A tensor that is whole to all who ask it, and of which this rank holds a part."""

    def whole(self) -> Tensor:
        """The plain whole tensor, differentiable; collective over the ranks that hold its parts."""
        raise NotImplementedError


def settled(value: Any) -> Any:
    """The whole of a deferred tensor; anything else is handed back."""
    return value.whole() if isinstance(value, Deferred) else value
