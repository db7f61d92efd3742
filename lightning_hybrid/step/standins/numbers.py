"""Absent numbers and arrays: stand-ins for what Python reads from absent tensors, NaNs that refuse to be compared.

Those kept on modules are replaced after the step (``pipeline.side_effects``); computing with them is refused.

Guessed reads: answers for code that reads a value of the model in a recording that is not replayed.

A step that branches on such values is recorded several times with different answers, so that its branches are visited.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import isnan  # the original function: it is patched during a step
from typing import Any, NoReturn

import numpy
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError
from lightning_hybrid.patching import ReplacedAll

# Methods of float that keep a mean: of any operands, and of one that is absent, which comes first.
_ADDITIVE = frozenset({"__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__pos__"})
_SCALING = frozenset({"__mul__", "__rmul__", "__truediv__"})


def _arithmetic(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of an absent number, which records the operation."""

    def method(number: AbsentFloat, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented  # the tensor's own method handles it
        values = number.values.union(*(getattr(other, "values", ()) for other in others))
        return AbsentFloat(number.line, values, operation=(name, (number, *others)))

    return method


class AbsentFloat(float):
    """A number read from an absent tensor: NaN, so results computed from it are NaN too.

    A comparison would decide a branch by an absent value, so it raises.
    """

    line: str
    values: frozenset[int]
    operation: tuple[str, tuple[Any, ...]] | None

    def __new__(
        cls,
        line: str = "",
        values: frozenset[int] = frozenset(),
        operation: tuple[str, tuple[Any, ...]] | None = None,
    ) -> AbsentFloat:
        """A number read from values at a line; or what an operation, a method of float, computes of operands."""
        number = super().__new__(cls, _nan_with_payload(values))
        number.line, number.values, number.operation = line, values, operation
        return number

    __add__, __radd__, __sub__, __rsub__ = map(_arithmetic, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __mul__, __rmul__, __truediv__ = map(_arithmetic, ("__mul__", "__rmul__", "__truediv__"))
    __rtruediv__, __pow__, __rpow__ = map(_arithmetic, ("__rtruediv__", "__pow__", "__rpow__"))
    __floordiv__, __rfloordiv__ = map(_arithmetic, ("__floordiv__", "__rfloordiv__"))
    __mod__, __rmod__ = map(_arithmetic, ("__mod__", "__rmod__"))
    __neg__, __pos__, __abs__, __round__ = map(_arithmetic, ("__neg__", "__pos__", "__abs__", "__round__"))

    @property
    def is_affine(self) -> bool:
        """Whether it is an affine function of the values, so that its mean follows from their means."""
        if self.operation is None:
            return True
        name, operands = self.operation
        absent = [operand for operand in operands if source_values(operand) is not None]
        if not all(isinstance(operand, AbsentFloat) and operand.is_affine for operand in absent):
            return False
        return name in _ADDITIVE or (name in _SCALING and len(absent) == 1 and absent[0] is operands[0])

    def computed(self, content: Mapping[int, Any]) -> bool | int | float:
        """Compute it from the values, tensors of one element by value index; ``KeyError`` if one is not there."""
        if self.operation is None:
            [value] = self.values
            number: bool | int | float = content[value].item()
            return number
        name, operands = self.operation
        first, *others = (o.computed(content) if isinstance(o, AbsentFloat) else o for o in operands)
        result: float = getattr(float, name)(float(first), *others)
        return result

    def __str__(self) -> str:
        """As a NaN is printed, with a notice."""
        tell_absent(self.line)
        return super().__repr__()

    def __format__(self, how: str) -> str:
        """As a NaN is printed, with a notice."""
        tell_absent(self.line)
        return super().__format__(how)

    def _refuse(self, *_: Any) -> NoReturn:
        raise ControlFlowError(branch_message(self.line), entry="branch")

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = _refuse

    def __eq__(self, other: object) -> bool:
        """Refuse, since it decides by the content."""
        self._refuse()

    def __ne__(self, other: object) -> bool:
        self._refuse()

    __hash__ = float.__hash__


# A NaN has a payload, which float(x) and most arithmetic propagate. So numbers computed from an absent one are
# recognized also after a conversion to a plain float.
_NAN_BITS = 0x7FF85A7D


def _nan_with_payload(values: frozenset[int]) -> float:
    bits = _NAN_BITS << 32 | min(values, default=0xFFFFFFFF)
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


ABSENT = _nan_with_payload(frozenset())  # in place of a number that is not on this rank, or was not made


def is_known(number: float) -> bool:
    """Whether a number is here: it may be NaN, as a loss that diverges is."""
    return source_values(number) is None


def source_values(number: Any) -> frozenset[int] | None:
    """The values of the step graph that an absent number or array was computed from; None for others."""
    if isinstance(number, AbsentFloat | AbsentArray):
        return number.values
    if not isinstance(number, float) or not isnan(number):
        return None
    bits = struct.unpack("<Q", struct.pack("<d", number))[0] & 0x7FFFFFFFFFFFFFFF
    return frozenset({bits & 0xFFFFFFFF}) - {0xFFFFFFFF} if bits >> 32 == _NAN_BITS else None


def branch_message(line: str) -> str:
    """The error message for a step that branches on an absent value."""
    return (
        f"{line}: the step branches on a value that is computed by the model, which is not available while the step is"
        " recorded, nor later on every pipeline stage; decide from the batch alone, use torch.where, or"
        f" {WITHOUT_STAGES}"
    )


def content_message(line: str, name: str) -> str:
    """The error message for a step that computes with the content of an absent tensor."""
    return (
        f"{line}: .{name}() reads values of the model that are not available while the step is recorded, nor later on"
        " every pipeline stage; compute with torch functions before you read (an array that is read may be kept on the"
        f" module unchanged), keep the tensor itself (it is filled in after the step), or {WITHOUT_STAGES}"
    )


@functools.cache
def tell_absent(line: str) -> None:
    """Tell, once for each line, why a number that the step prints is NaN."""
    rank_zero_info(
        f"{line}: prints NaN or 'absent' in place of a number of the model while the step is recorded, before the"
        " first batch, and on pipeline ranks that do not compute it; the rank that does prints one per microbatch. For"
        " the number of the batch call self.log(name, tensor), and print trainer.callback_metrics[name] in"
        " on_train_batch_end (lightning-hybrid explain-error print-absent)"
    )


class AbsentArray:
    """A stand-in for a NumPy array whose content is on another rank; it has a shape and refuses all else."""

    line: str
    values: frozenset[int]
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]

    def __init__(self, line: str, like: Tensor, values: frozenset[int]) -> None:
        """Stand in for the array of an absent tensor, of these values, that the user's ``line`` has read."""
        self.__dict__.update(line=line, values=values, shape=tuple(like.shape), ndim=like.dim(), size=like.numel())
        self.__dict__.update(dtype=dtype_of_array(like))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")  # as NumPy does
        return self.shape[0]

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
    __array__ = __array_function__ = __array_ufunc__ = _refuse

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
    absent_number: float | None,
) -> Any:
    """The stand-in for the result of ``tolist()`` or ``numpy()`` on an absent tensor, of the same shape.

    Each element is ``absent_number`` instead during the search for branches.
    """
    shape = tuple(tensor.shape)
    if name == "numpy":
        if absent_number is None:
            return AbsentArray(line, tensor, values)
        return numpy.full(shape, absent_number, dtype=dtype_of_array(tensor))

    def nested(sizes: tuple[int, ...]) -> Any:
        if not sizes:
            return AbsentFloat(line, values) if absent_number is None else absent_number
        return [nested(sizes[1:]) for _ in range(sizes[0])]

    return nested(shape)


def dtype_of_array(tensor: Tensor) -> numpy.dtype[Any]:
    """The dtype of the array that a tensor of any shape is read as."""
    return numpy.dtype(str(tensor.dtype).removeprefix("torch."))


# ``FakeTensor.tolist`` overrides torch's and reads number by number; no mode intercepts it.
TOLIST_PATCH = (FakeTensor, "tolist", Tensor.tolist)


def interceptable_tolist() -> AbstractContextManager[None]:
    """Let function modes intercept the ``tolist`` of absent tensors."""
    return ReplacedAll([TOLIST_PATCH], reason="function modes see tolist")


# The answers that each recording gives, in turn.
GUESSES = ((True,), (False,), (True, False), (False, True))
# Floats read from the model: one small and one large, so that a comparison with a threshold goes either way.
_FLOATS = {True: 0.5, False: 1e4}


def answer_guessed_read(name: str, absent: Tensor, guess: bool) -> Any:
    """The guessed result of a read of an absent tensor: a number or a truth value, or an array of its shape.

    ``guess`` selects one of two answers.
    """
    number = _guessed_number(absent.dtype, guess)
    if name in ("item", "__complex__"):
        return number
    if name == "__float__":
        return float(number.real)
    if name in ("__int__", "__index__"):
        return int(guess)
    if name in ("tolist", "numpy", "__array__", "__dlpack__"):
        with torch._C.DisableTorchFunction():
            content = torch.full(tuple(absent.shape), number, dtype=absent.dtype)
        if name == "tolist":
            return content.tolist()
        content = content.float() if content.dtype is torch.bfloat16 else content  # NumPy has no equivalent dtype
        return content.__dlpack__() if name == "__dlpack__" else content.numpy()
    if name in ("__repr__", "__str__", "__format__"):
        return str(number)
    return guess


def _guessed_number(dtype: torch.dtype, guess: bool) -> Any:
    if dtype is torch.bool:
        return guess
    if dtype.is_complex:
        return complex(_FLOATS[guess])
    return _FLOATS[guess] if dtype.is_floating_point else int(guess)
