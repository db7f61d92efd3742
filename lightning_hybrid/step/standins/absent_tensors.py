"""Absent tensors and numbers: stand-ins without storage for values of another stage.

An *absent* tensor is a ``FakeTensor``: it answers shape, dtype and the real device, has no storage, and mixes with real
tensors. Absent parameters keep the identity of the user's ``Parameter`` objects, so optimizers that refer to them stay
valid; an absent number is a NaN that refuses to be compared.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterator
from math import isnan  # the original function: it is patched during a step
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.patching import MARK as PACKAGE_MARK

FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=True)
_MOST_KERNELS = 1 << 14  # some 2 KB each

_BUILTIN = "_hybrid_stock"  # attribute of a dropped parameter: names of its attributes not set by the user
FULL_SHAPE = "_hybrid_whole_shape"  # attribute of a parameter of which this rank has a shard: the full shape
# Properties and methods that read a tensor's shape.
SHAPE_PROPERTIES = frozenset({"shape", "ndim", "nbytes"})
SHAPE_METHODS = frozenset({"size", "numel", "nelement", "dim", "ndimension", "__len__"})
MARK = "_hybrid_value"  # attribute of a tensor: (token of the run, value index)


# Answers to finiteness checks of absent values.
IF_FINITE = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}


class ControlFlowError(RuntimeError):
    """User code branches on an absent value."""


def make_absent(like: Tensor, *, requires_grad: bool | None = None, device: torch.device | None = None) -> FakeTensor:
    """A stand-in with the shape, strides, dtype and (if not given) device of ``like`` and no storage.

    It is built without dispatching an operation, so there is no weak reference to it and its content can be swapped
    for real data later (``torch.utils.swap_tensors``).
    """
    if device is None:
        device = like.fake_device if isinstance(like, FakeTensor) else like.device
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return _fake_tensor(meta, device, like.requires_grad if requires_grad is None else requires_grad)


def make_placeholder(value: Value, device: torch.device) -> FakeTensor:
    """A stand-in for one value of a step graph.

    Args:
        value: The metadata of the value.
        device: The device of this rank.
    """
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")
    return _fake_tensor(meta, torch.device(value.device) if value.device else device, value.requires_grad)


def limit_kernel_cache() -> None:
    """Limit torch's cache of fake kernel results, which grows with each new size of a batch."""
    if len(FakeTensorMode.cache) > _MOST_KERNELS:
        FakeTensorMode.cache_clear()


def _fake_tensor(meta: Tensor, device: torch.device, requires_grad: bool) -> FakeTensor:
    absent = FakeTensor(FAKE_MODE, meta, device)
    absent.requires_grad_(requires_grad)
    return absent


def make_absent_parameter(parameter: Tensor, device: torch.device | None = None) -> FakeTensor:
    """A stand-in for a parameter or buffer, of the full shape; ``isinstance(x, nn.Parameter)`` is as before."""
    shape = parameter.__dict__.get(FULL_SHAPE)
    like = parameter
    if shape is not None:
        device = parameter.device if device is None else device
        with torch._C._DisableTorchDispatch():
            like = torch.empty(shape, dtype=parameter.dtype, device="meta")
    absent = make_absent(like, requires_grad=parameter.requires_grad, device=device)
    if isinstance(parameter, nn.Parameter):
        absent._is_param = True
    return absent


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """The full shape of a parameter, which may be absent or a local shard."""
    return tuple(parameter.__dict__.get(FULL_SHAPE, parameter.shape))


def full_shape_meta(parameter: Tensor) -> Tensor:
    """A meta tensor with the full shape of a parameter, for queries of its shape."""
    with torch._C.DisableTorchFunction():
        return torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta")


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that the user set on a tensor or parameter, absent or not."""
    attributes = tensor.__dict__
    stock = attributes.get(_BUILTIN, () if not is_absent(tensor) else attributes)
    return {n: v for n, v in attributes.items() if n not in stock and not n.startswith((PACKAGE_MARK, "__"))}


def is_absent(value: Any) -> bool:
    """Whether ``value`` is a stand-in without content."""
    return isinstance(value, FakeTensor | AbsentFloat)


def drop(parameter: Tensor, device: torch.device | None = None) -> None:
    """Free the storage of ``parameter`` in place: the same object becomes absent and keeps the user's attributes.

    Args:
        parameter: With content, or on the meta device.
        device: The device that it reports from now on; its present device if None.
    """
    absent = make_absent_parameter(parameter, device)
    parameter.grad = None
    attributes = parameter.__dict__
    absent.__dict__[_BUILTIN] = {*absent.__dict__, _BUILTIN}
    swap_in_place(parameter, absent)
    parameter.__dict__.update(attributes)


def fill(absent: Tensor, content: Tensor) -> None:
    """Give an absent tensor its content in place; ``content`` must not be used afterwards."""
    before = absent.__dict__
    swap_in_place(absent, content)
    if _BUILTIN in before:
        absent.__dict__.update((name, value) for name, value in before.items() if name not in before[_BUILTIN])


def swap_in_place(first: Tensor, second: Tensor) -> None:
    """Swap two tensors as ``torch.utils.swap_tensors``, also if weak references exist (as ``nn.LSTM`` has).

    These refer to the user's object, whose identity does not change.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)


class AbsentFloat(float):
    """A number read from an absent tensor: NaN, so results computed from it are NaN too.

    A comparison would decide a branch by an absent value, so it raises; unless the number's value is known under the
    assumption that the model's values are finite.
    """

    line: str
    values: frozenset[int]
    assumed_finite: set[int] | None
    finite_answer: bool | int | float | None

    def __new__(
        cls,
        line: str = "",
        values: frozenset[int] = frozenset(),
        assumed_finite: set[int] | None = None,
        finite_answer: bool | int | float | None = None,
    ) -> AbsentFloat:
        """An absent number.

        Args:
            line: The user's line that read it, for messages.
            values: The values of the step graph that it was computed from.
            assumed_finite: Set to which values are added that a branch assumes to be finite.
            finite_answer: Its value under that assumption; None if unknown.
        """
        number = super().__new__(cls, _nan_with_payload(values))
        number.line, number.values, number.assumed_finite, number.finite_answer = (
            line,
            values,
            assumed_finite,
            finite_answer,
        )
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
            raise ControlFlowError(branch_message(self.line))
        return self.assume_finite(self.finite_answer)

    def assume_finite(self, answer: Any) -> Any:
        """Return an answer that holds for finite values, and record that other ranks are to check it."""
        if self.assumed_finite is None or not self.values:
            raise ControlFlowError(branch_message(self.line))
        self.assumed_finite.update(self.values)
        return answer

    def __eq__(self, other: object) -> bool:
        """Compare; a number that is not NaN equals itself."""
        return bool(self.assume_finite(True) if other is self else self._value_or_raise() == other)

    def __ne__(self, other: object) -> bool:
        """Negate ``==``."""
        return not self == other

    def __lt__(self, other: Any) -> bool:
        """Compare the value under the assumption of finiteness, or raise."""
        return bool(self._value_or_raise() < other)

    def __le__(self, other: Any) -> bool:
        """Compare as ``<`` does."""
        return bool(self._value_or_raise() <= other)

    def __gt__(self, other: Any) -> bool:
        """Compare as ``<`` does."""
        return bool(self._value_or_raise() > other)

    def __ge__(self, other: Any) -> bool:
        """Compare as ``<`` does."""
        return bool(self._value_or_raise() >= other)

    def __bool__(self) -> bool:
        """Convert the value under the assumption of finiteness, or raise."""
        return bool(self._value_or_raise())

    __hash__ = float.__hash__

    def __int__(self) -> int:
        """Convert as ``bool()`` does."""
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
        f"{line}: the step branches on a value that is computed by the model, which is not there while the step is"
        " recorded, nor later on every pipeline stage. Make the decision from the batch alone, use torch.where,"
        " or set pipeline_parallel_size=1"
    )


def members_to_replace(root: nn.Module, tracked: Collection[str]) -> list[tuple[nn.Module, str, str]]:
    """The parameters and tracked buffers that a recording replaces, as (module, name of the member, FQN)."""
    return [
        (module, member, f"{fqn}.{member}" if fqn else member)
        for fqn, module in root.named_modules()
        for members, is_always in ((module._parameters, True), (module._buffers, False))
        for member, tensor in members.items()
        if tensor is not None and (is_always or (f"{fqn}.{member}" if fqn else member) in tracked)
    ]


@contextlib.contextmanager
def absent_members(owners: list[tuple[nn.Module, str, str]]) -> Iterator[dict[int, str]]:
    """Replace parameters and buffers by fresh stand-ins for a recording.

    Args:
        owners: (module, name of the member, FQN); members that are one tensor share one stand-in.

    Yields:
        FQN by id of the stand-in, under the first name that a shared tensor has.
    """
    saved: list[tuple[Any, Any, Tensor]] = []
    stand_ins: dict[int, tuple[Tensor, str]] = {}
    try:
        for module, name, fqn in owners:
            members: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            original = members[name]
            assert original is not None
            if id(original) not in stand_ins:
                stand_ins[id(original)] = make_absent_parameter(original), fqn
            saved.append((members, name, original))
            members[name] = stand_ins[id(original)][0]
        for module in {id(module): module for module, _, _ in owners}.values():
            # torch's recurrent layers, and users, keep parameters in plain lists and dicts too.
            for container in module.__dict__.values():
                if type(container) is list or (
                    type(container) is dict and container is not module._parameters and container is not module._buffers
                ):
                    _substitute(container, stand_ins, saved)
        yield {id(stand_in): fqn for stand_in, fqn in stand_ins.values()}
    finally:
        for members, name, original in saved:
            members[name] = original


def _substitute(container: Any, stand_ins: dict[int, tuple[Tensor, str]], saved: list[tuple[Any, Any, Tensor]]) -> None:
    for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
        if isinstance(item, Tensor) and id(item) in stand_ins:
            saved.append((container, key, item))
            container[key] = stand_ins[id(item)][0]
