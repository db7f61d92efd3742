"""Absent numbers: stand-ins for numbers read from absent tensors, NaNs that refuse to be compared."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import isnan  # the original function: it is patched during a step
from typing import Any, TypeAlias

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError

Answer: TypeAlias = bool | int | float  # to a finiteness check

# Answers to finiteness checks of absent values.
IF_FINITE = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}


# Methods of float that keep a mean: of any operands, and of one that is absent, which comes first.
_ADDITIVE = frozenset({"__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__pos__"})
_SCALING = frozenset({"__mul__", "__rmul__", "__truediv__"})


def _arithmetic(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of an absent number, which records the operation."""

    def method(number: AbsentFloat, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented  # the tensor's own method handles it
        values = number.values.union(*(getattr(other, "values", ()) for other in others))
        return AbsentFloat(number.line, values, number.assumed_finite, operation=(name, (number, *others)))

    return method


class AbsentFloat(float):
    """A number read from an absent tensor: NaN, so results computed from it are NaN too.

    A comparison would decide a branch by an absent value, so it raises; unless the number's value is known under the
    assumption that the model's values are finite.
    """

    line: str
    values: frozenset[int]
    assumed_finite: set[int] | None
    finite_answer: Answer | None
    operation: tuple[str, tuple[Any, ...]] | None

    def __new__(
        cls,
        line: str = "",
        values: frozenset[int] = frozenset(),
        assumed_finite: set[int] | None = None,
        finite_answer: Answer | None = None,
        operation: tuple[str, tuple[Any, ...]] | None = None,
    ) -> AbsentFloat:
        """An absent number.

        Args:
            line: The user's line that read it, for messages.
            values: The values of the step graph that it was computed from.
            assumed_finite: Set to which values are added that a branch assumes to be finite.
            finite_answer: Its value under that assumption; None if unknown.
            operation: The method of ``float`` that computes it, and its operands; None if it was read from a tensor.
        """
        number = super().__new__(cls, _nan_with_payload(values))
        number.line, number.values = line, values
        number.assumed_finite, number.finite_answer = assumed_finite, finite_answer
        number.operation = operation
        return number

    __add__, __radd__, __sub__, __rsub__ = map(_arithmetic, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __mul__, __rmul__, __truediv__ = map(_arithmetic, ("__mul__", "__rmul__", "__truediv__"))
    __rtruediv__, __pow__, __rpow__ = map(_arithmetic, ("__rtruediv__", "__pow__", "__rpow__"))
    __floordiv__, __rfloordiv__ = map(_arithmetic, ("__floordiv__", "__rfloordiv__"))
    __mod__, __rmod__ = map(_arithmetic, ("__mod__", "__rmod__"))
    __neg__, __pos__, __abs__, __round__ = map(_arithmetic, ("__neg__", "__pos__", "__abs__", "__round__"))

    @property
    def is_affine(self) -> bool:
        """Whether it is an affine function of the values, so that its mean is that of their means."""
        if self.operation is None:
            return True
        name, operands = self.operation
        absent = [operand for operand in operands if source_values(operand) is not None]
        if not all(isinstance(operand, AbsentFloat) and operand.is_affine for operand in absent):
            return False
        return name in _ADDITIVE or (name in _SCALING and len(absent) == 1 and absent[0] is operands[0])

    def computed(self, content: Mapping[int, Any]) -> Answer:
        """Compute it from the values, tensors of one element by value index.

        Raises:
            KeyError: A value is not there.
        """
        if self.operation is None:
            [value] = self.values
            number: Answer = content[value].item()
            return number
        name, operands = self.operation
        first, *others = (o.computed(content) if isinstance(o, AbsentFloat) else o for o in operands)
        result: Answer = getattr(float, name)(float(first), *others)
        return result

    def _value_or_raise(self) -> bool | int | float:
        if self.finite_answer is None:
            raise ControlFlowError(branch_message(self.line), entry="branch")
        return self.assume_finite(self.finite_answer)

    def assume_finite(self, answer: Any) -> Any:
        """Return an answer that holds for finite values, and record that other ranks are to check it."""
        if self.assumed_finite is None or not self.values:
            raise ControlFlowError(branch_message(self.line), entry="branch")
        self.assumed_finite.update(self.values)
        return answer

    def __eq__(self, other: object) -> bool:
        """Compare; a number that is not NaN equals itself."""
        return bool(self.assume_finite(True) if other is self else self._value_or_raise() == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return bool(self._value_or_raise() < other)

    def __le__(self, other: Any) -> bool:
        return bool(self._value_or_raise() <= other)

    def __gt__(self, other: Any) -> bool:
        return bool(self._value_or_raise() > other)

    def __ge__(self, other: Any) -> bool:
        return bool(self._value_or_raise() >= other)

    def __bool__(self) -> bool:
        return bool(self._value_or_raise())

    __hash__ = float.__hash__

    def __int__(self) -> int:
        return int(self._value_or_raise())


# A NaN has a payload, which float(x) and most arithmetic propagate. So numbers computed from an absent one are
# recognized also after a conversion to a plain float.
_NAN_BITS = 0x7FF85A7D


def _nan_with_payload(values: frozenset[int]) -> float:
    bits = _NAN_BITS << 32 | min(values, default=0xFFFFFFFF)
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def source_values(number: Any) -> frozenset[int] | None:
    """The values of the step graph that an absent number was computed from; None for other numbers."""
    if isinstance(number, AbsentFloat):
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
