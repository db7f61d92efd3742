"""Absent tensors and numbers: stand-ins without storage for what lives on another stage.

An *absent* tensor is a ``FakeTensor``: it answers shape, dtype and the real device, has no storage, and mixes with real
tensors. Absent parameters keep the identity of the user's ``Parameter`` objects, so optimizers that hold them stay
right; an absent number is a NaN that refuses to be compared.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterator
from math import isnan  # the function itself: a step asks another
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.patching import MARK as OF_PACKAGE

FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=True)
_MOST_KERNELS = 1 << 14  # some 2 KB each

_STOCK = "_hybrid_stock"  # attribute of a dropped parameter: names of its attributes that users did not give it
WHOLE_SHAPE = "_hybrid_whole_shape"  # attribute of a parameter of which this rank holds a part: the shape of the whole
# What is asked of a tensor's shape, by properties and by methods.
SHAPE_PROPERTIES = frozenset({"shape", "ndim", "nbytes"})
SHAPE_METHODS = frozenset({"size", "numel", "nelement", "dim", "ndimension", "__len__"})
MARK = "_hybrid_value"  # attribute of a tensor: (token of the run, value index)


# What questions whether values are finite are answered with where the values are not.
ANSWERS = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}


class ControlFlowError(RuntimeError):
    """User code branches on a value that is not there."""


def make_absent(like: Tensor, *, requires_grad: bool | None = None, device: torch.device | None = None) -> FakeTensor:
    """A stand-in with the shape, strides, dtype and (if not given) device of ``like`` and no storage.

    It is built without dispatching an operation, so nothing holds a weak reference to it and its content can be
    swapped for real data later (``torch.utils.swap_tensors``).
    """
    if device is None:
        device = like.fake_device if isinstance(like, FakeTensor) else like.device
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return _absent(meta, device, like.requires_grad if requires_grad is None else requires_grad)


def make_placeholder(value: Value, device: torch.device) -> FakeTensor:
    """A stand-in for one value of a step graph.

    Args:
        value: What is known of it.
        device: Of this rank.
    """
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")
    return _absent(meta, torch.device(value.device) if value.device else device, value.requires_grad)


def forget_kernels() -> None:
    """Bound torch's own memory of its fake kernels, which grows with each new size of a batch."""
    if len(FakeTensorMode.cache) > _MOST_KERNELS:
        FakeTensorMode.cache_clear()


def _absent(meta: Tensor, device: torch.device, requires_grad: bool) -> FakeTensor:
    absent = FakeTensor(FAKE_MODE, meta, device)
    absent.requires_grad_(requires_grad)
    return absent


def make_absent_parameter(parameter: Tensor, device: torch.device | None = None) -> FakeTensor:
    """A stand-in for a parameter or buffer; ``isinstance(x, nn.Parameter)`` holds where it held before."""
    whole = parameter.__dict__.get(WHOLE_SHAPE)
    like = parameter
    if whole is not None:
        device = parameter.device if device is None else device
        with torch._C._DisableTorchDispatch():
            like = torch.empty(whole, dtype=parameter.dtype, device="meta")
    absent = make_absent(like, requires_grad=parameter.requires_grad, device=device)
    if isinstance(parameter, nn.Parameter):
        absent._is_param = True
    return absent


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape that a parameter has in one process: it may be absent, or a part."""
    return tuple(parameter.__dict__.get(WHOLE_SHAPE, parameter.shape))


def as_whole(parameter: Tensor) -> Tensor:
    """The whole of a parameter without content: to ask it for its shape."""
    with torch._C.DisableTorchFunction():
        return torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users gave a tensor or parameter, absent or not."""
    attributes = tensor.__dict__
    stock = attributes.get(_STOCK, () if not is_absent(tensor) else attributes)
    return {n: v for n, v in attributes.items() if n not in stock and not n.startswith((OF_PACKAGE, "__"))}


def is_absent(value: Any) -> bool:
    """Whether ``value`` is a stand-in without content."""
    return isinstance(value, FakeTensor | AbsentFloat)


def drop(parameter: Tensor, device: torch.device | None = None) -> None:
    """Free the storage of ``parameter`` in place: the same object becomes absent, with the attributes users gave it.

    Args:
        parameter: With content, or on the meta device.
        device: What it answers from now on; its own device if None.
    """
    absent = make_absent_parameter(parameter, device)
    parameter.grad = None
    attributes = parameter.__dict__
    absent.__dict__[_STOCK] = {*absent.__dict__, _STOCK}
    exchange(parameter, absent)
    parameter.__dict__.update(attributes)


def fill(absent: Tensor, content: Tensor) -> None:
    """Give an absent tensor its content in place; ``content`` must not be used afterwards."""
    before = absent.__dict__
    exchange(absent, content)
    if _STOCK in before:
        absent.__dict__.update((name, value) for name, value in before.items() if name not in before[_STOCK])


def exchange(first: Tensor, second: Tensor) -> None:
    """``torch.utils.swap_tensors`` also where weak references exist (``nn.LSTM`` holds some to its parameters).

    They mean the user's object, which stays the same.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)


class AbsentFloat(float):
    """A number read from an absent tensor: NaN, so what is computed from it is NaN too.

    Its comparison would decide a branch by a value that is not there, so it raises; unless it is known what the number
    is if the model's are finite.
    """

    line: str
    values: frozenset[int]
    asked: set[int] | None
    taken: bool | int | float | None

    def __new__(
        cls,
        line: str = "",
        values: frozenset[int] = frozenset(),
        asked: set[int] | None = None,
        taken: bool | int | float | None = None,
    ) -> AbsentFloat:
        """An absent number.

        Args:
            line: Where it was read, for messages.
            values: Of the step graph that it was computed from.
            asked: Where to note values by which the step decides as if all numbers were finite.
            taken: What it is then.
        """
        number = super().__new__(cls, _nan_of(values))
        number.line, number.values, number.asked, number.taken = line, values, asked, taken
        return number

    def _arithmetic(self, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented  # a tensor knows better
        values = self.values.union(*(getattr(other, "values", ()) for other in others))
        return AbsentFloat(self.line, values, self.asked)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __rpow__ = __neg__ = __pos__ = __abs__ = _arithmetic
    __pow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _arithmetic
    __round__ = _arithmetic

    def _taken(self) -> bool | int | float:
        if self.taken is None:
            raise ControlFlowError(branch_message(self.line))
        return self.known_if_finite(self.taken)

    def known_if_finite(self, answer: Any) -> Any:
        """An answer that other ranks are to check."""
        if self.asked is None or not self.values:
            raise ControlFlowError(branch_message(self.line))
        self.asked.update(self.values)
        return answer

    def __eq__(self, other: object) -> bool:
        """A number that is no NaN equals itself."""
        return bool(self.known_if_finite(True) if other is self else self._taken() == other)

    def __ne__(self, other: object) -> bool:
        """As above."""
        return not self == other

    def __lt__(self, other: Any) -> bool:
        """See the class, as for all that follow."""
        return bool(self._taken() < other)

    def __le__(self, other: Any) -> bool:
        """See above."""
        return bool(self._taken() <= other)

    def __gt__(self, other: Any) -> bool:
        """See above."""
        return bool(self._taken() > other)

    def __ge__(self, other: Any) -> bool:
        """See above."""
        return bool(self._taken() >= other)

    def __bool__(self) -> bool:
        """See above."""
        return bool(self._taken())

    __hash__ = float.__hash__

    def __int__(self) -> int:
        """See above."""
        return int(self._taken())


# A NaN has room for a number, which float(x) and most arithmetic pass on. So what was computed from a number that is
# not there is known also where Python has made a plain float of it.
_NAN_BITS = 0x7FF85A7D


def _nan_of(values: frozenset[int]) -> float:
    bits = _NAN_BITS << 32 | min(values, default=0xFFFFFFFF)
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def values_behind(number: Any) -> frozenset[int] | None:
    """The values of the step graph that a number was computed from; None if it is no absent one."""
    if isinstance(number, AbsentFloat):
        return number.values
    if not isinstance(number, float) or not isnan(number):
        return None
    bits = struct.unpack("<Q", struct.pack("<d", number))[0] & 0x7FFFFFFFFFFFFFFF
    return frozenset({bits & 0xFFFFFFFF}) - {0xFFFFFFFF} if bits >> 32 == _NAN_BITS else None


def branch_message(line: str) -> str:
    """What to tell a user whose step branches on an absent value."""
    return (
        f"{line}: the step branches on a value that is computed by the model, which is not there while the step is"
        " recorded, nor later on every pipeline stage. Make the decision from the batch alone, use torch.where,"
        " or set pipeline_parallel_size=1"
    )


def owned_by(root: nn.Module, tracked: Collection[str]) -> list[tuple[nn.Module, str, str]]:
    """What a recording replaces: parameters, and tracked buffers; their module, their name there and their FQN."""
    return [
        (module, member, f"{fqn}.{member}" if fqn else member)
        for fqn, module in root.named_modules()
        for members, everything in ((module._parameters, True), (module._buffers, False))
        for member, tensor in members.items()
        if tensor is not None and (everything or (f"{fqn}.{member}" if fqn else member) in tracked)
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
            # torch's recurrent layers, and users, hold parameters in plain lists and dicts too.
            for held in module.__dict__.values():
                if type(held) is list or (
                    type(held) is dict and held is not module._parameters and held is not module._buffers
                ):
                    _substitute(held, stand_ins, saved)
        yield {id(stand_in): fqn for stand_in, fqn in stand_ins.values()}
    finally:
        for members, name, original in saved:
            members[name] = original


def _substitute(held: Any, stand_ins: dict[int, tuple[Tensor, str]], saved: list[tuple[Any, Any, Tensor]]) -> None:
    for key, item in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(item, Tensor) and id(item) in stand_ins:
            saved.append((held, key, item))
            held[key] = stand_ins[id(item)][0]
