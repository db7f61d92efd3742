"""Marks: which value of the step graph a tensor is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_hybrid.patching import MARK

_VALUE = MARK + "_value"  # attribute of a tensor: (token of the run, value index)
_NO_VALUE = (None, None)


class Marks:
    """Marks tensors, of any shape, as values of one run of a step."""

    def __init__(self) -> None:
        # Tensors name their run by a token: a reference to the run, which holds tensors, would be a cycle that keeps
        # activations alive until Python collects its garbage.
        self._run = object()

    def of(self, value: Any) -> int | None:
        """The value index of a tensor in this run; None for one that is computed from the batch alone, and others."""
        run, index = getattr(value, _VALUE, _NO_VALUE) if isinstance(value, Tensor) else _NO_VALUE
        return index if run is self._run else None

    def __contains__(self, value: object) -> bool:
        return self.of(value) is not None

    def among(self, values: Iterable[Any]) -> tuple[int, ...]:
        """The value indices of some objects, each once, in their order."""
        return tuple(dict.fromkeys(index for value in values if (index := self.of(value)) is not None))

    def set(self, tensor: Tensor, index: int) -> None:
        """Let a tensor of any shape be this value from now on."""
        setattr(tensor, _VALUE, (self._run, index))


def mark_in_any_run(value: Any) -> int | None:
    """The value index of an object in the run that has marked it last; None if none has."""
    return getattr(value, _VALUE, _NO_VALUE)[1]


def unmark(tensor: Tensor) -> None:
    """Let a tensor of any shape be no value."""
    tensor.__dict__.pop(_VALUE, None)


def copy_mark(source: Tensor, target: Tensor) -> None:
    """Let a tensor be the value that another one, of any shape, is, if that is one."""
    if mark_in_any_run(source) is not None:
        setattr(target, _VALUE, getattr(source, _VALUE))
