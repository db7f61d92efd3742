"""Absent numbers: stand-ins for numbers read from absent tensors, NaNs that refuse to be compared."""

from __future__ import annotations

import struct
from math import isnan  # the original function: it is patched during a step
from typing import Any, TypeAlias

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError

Answer: TypeAlias = bool | int | float  # to a finiteness check

# Answers to finiteness checks of absent values.
IF_FINITE = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}


class AbsentFloat(float):
    """A number read from an absent tensor: NaN, so results computed from it are NaN too.

    A comparison would decide a branch by an absent value, so it raises; unless the number's value is known under the
    assumption that the model's values are finite.
    """

    line: str
    values: frozenset[int]
    assumed_finite: set[int] | None
    finite_answer: Answer | None

    def __new__(
        cls,
        line: str = "",
        values: frozenset[int] = frozenset(),
        assumed_finite: set[int] | None = None,
        finite_answer: Answer | None = None,
    ) -> AbsentFloat:
        """An absent number.

        Args:
            line: The user's line that read it, for messages.
            values: The values of the step graph that it was computed from.
            assumed_finite: Set to which values are added that a branch assumes to be finite.
            finite_answer: Its value under that assumption; None if unknown.
        """
        number = super().__new__(cls, _nan_with_payload(values))
        number.line, number.values = line, values
        number.assumed_finite, number.finite_answer = assumed_finite, finite_answer
        return number

    def _arithmetic(self, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented  # the tensor's own method handles it
        values = self.values.union(*(getattr(other, "values", ()) for other in others))
        return AbsentFloat(self.line, values, self.assumed_finite)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __rpow__ = __neg__ = __pos__ = __abs__ = _arithmetic
    __pow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _arithmetic
    __round__ = _arithmetic

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
