"""Absent arrays: stand-ins for the results of ``tolist()`` and ``numpy()`` on an absent tensor.

Those kept on modules are replaced after the step (``pipeline.side_effects``); computing with them is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import isnan  # the original function: it is patched during a step
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError
from lightning_hybrid.patching import ReplacedAll
from lightning_hybrid.step.standins.absent_numbers import IF_FINITE, AbsentFloat, source_values


def content_message(line: str, name: str) -> str:
    """The error message for a step that computes with the content of an absent tensor."""
    return (
        f"{line}: .{name}() reads values of the model that are not available while the step is recorded, nor later on"
        " every pipeline stage; compute with torch functions before you read (an array that is read may be kept on the"
        f" module unchanged), keep the tensor itself (it is filled in after the step), or {WITHOUT_STAGES}"
    )


class AbsentArray:
    """A stand-in for a NumPy array whose content is on another rank; it has a shape and refuses all else."""

    def __init__(self, line: str, like: Tensor, values: frozenset[int], assumed_finite: set[int] | None) -> None:
        """Stand in for the array of an absent tensor that the user's ``line`` has read; the rest as ``AbsentFloat``."""
        self.__dict__.update(line=line, shape=tuple(like.shape), ndim=like.dim(), size=like.numel())
        self.__dict__.update(values=values, assumed_finite=assumed_finite)

    def __len__(self) -> int:
        return int(self.__dict__["shape"][0])

    def __repr__(self) -> str:
        return f"absent{self.__dict__['shape']}"

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse, since everything but the sizes is content."""
        if name.startswith("__"):  # Python and NumPy check which protocols an object supports
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ControlFlowError(content_message(self.__dict__["line"], "numpy"), entry="content")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __getitem__ = __iter__ = __contains__ = __bool__ = __int__ = __float__ = __index__ = __round__ = _refuse
    __setitem__ = __delitem__ = __setattr__ = _refuse
    __array__ = __array_function__ = _refuse

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Answer finiteness checks, refuse all other ufuncs."""
        assumed_finite, values = self.__dict__["assumed_finite"], self.__dict__["values"]
        if ufunc.__name__ not in IF_FINITE or method != "__call__" or not values or assumed_finite is None:
            self._refuse()
        assumed_finite.update(values)
        return numpy.full(self.__dict__["shape"], IF_FINITE[ufunc.__name__])

    def __eq__(self, other: object) -> bool:
        """Refuse, since elements are content."""
        self._refuse()

    __hash__ = object.__hash__


def has_absent_content(leaf: Any) -> bool:
    """Whether a leaf is a number, or an array of numbers, whose content is on other ranks only."""
    return source_values(leaf) is not None or isinstance(leaf, AbsentArray)


def is_absent_number(leaf: Any) -> bool:
    """Whether a leaf was read from an absent tensor, or computed from such a number: it is, or contains, a NaN."""
    if isinstance(leaf, float | numpy.floating):
        return isnan(leaf)
    if isinstance(leaf, numpy.ndarray):
        return leaf.dtype.kind == "f" and bool((leaf != leaf).any())
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() and leaf.layout is torch.strided and bool(leaf.isnan().any())
    return isinstance(leaf, AbsentArray)


def line_of_read(leaf: Any, otherwise: str) -> str:
    """The line that read such a number; ``otherwise`` for a number computed from it."""
    return leaf.line if isinstance(leaf, AbsentFloat | AbsentArray) else otherwise


def stand_in_for_content(
    name: str,
    line: str,
    tensor: Tensor,
    values: frozenset[int],
    assumed_finite: set[int] | None,
    absent_number: float | None,
) -> Any:
    """The stand-in for the result of ``tolist()`` or ``numpy()`` on an absent tensor, of the same shape.

    Args:
        name: "tolist" or "numpy".
        line: The user's line that reads it.
        tensor: The absent tensor, of any shape.
        values: Its value in the step graph.
        assumed_finite: Set to which values are added that a branch assumes to be finite.
        absent_number: The number for every element instead, during the search for branches.
    """
    shape = tuple(tensor.shape)
    if name == "numpy":
        if absent_number is None:
            return AbsentArray(line, tensor, values, assumed_finite)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return numpy.full(shape, absent_number, dtype=numpy.dtype(dtype))

    def nested(sizes: tuple[int, ...]) -> Any:
        if not sizes:
            return AbsentFloat(line, values, assumed_finite) if absent_number is None else absent_number
        return [nested(sizes[1:]) for _ in range(sizes[0])]

    return nested(shape)


# ``FakeTensor.tolist`` overrides torch's and reads number by number; no mode intercepts it.
TOLIST_PATCH = (FakeTensor, "tolist", Tensor.tolist)


def interceptable_tolist() -> AbstractContextManager[None]:
    """Let function modes intercept the ``tolist`` of absent tensors."""
    return ReplacedAll([TOLIST_PATCH], reason="function modes see tolist")
