"""Absent tensors: stand-ins without storage for values of another stage.

An *absent* tensor is a ``FakeTensor``: it answers shape, dtype and the real device, has no storage, and mixes with real
tensors. Absent parameters keep the identity of the user's ``Parameter`` objects, so optimizers that refer to them stay
valid.

Deferred tensors: sharded content that is gathered from several ranks only when it is read.

The user's code receives such a tensor; the full tensor is used where it leaves the run of a step (sent to another
stage, returned, kept on the module, passed to a metric).

A lazy full tensor: a rank holds a shard of it, and the full tensor is gathered when it is read.

Its shape, dtype and device are those of the full tensor. Any other operation runs on the full tensor, which is gathered
from the ranks that hold the shards, and cached. Code that supports the class uses the shard instead, so that nothing is
communicated between two such layers.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.patching import MARK
from lightning_hybrid.step.objects.names import METADATA
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call
from lightning_hybrid.step.standins.numbers import AbsentFloat

FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=True)
_MOST_KERNELS = 1 << 14  # some 2 KB each
_ABSENT = (FakeTensor, AbsentFloat)

_BUILTIN = "_hybrid_stock"  # attribute of a dropped parameter: names of its attributes not set by the user
FULL_SHAPE = "_hybrid_whole_shape"  # attribute of a parameter of which this rank has a shard: the full shape
# Properties and methods that read a tensor's shape.
SHAPE_PROPERTIES = frozenset({"shape", "ndim", "nbytes"})
SHAPE_METHODS = frozenset({"size", "numel", "nelement", "dim", "ndimension", "__len__"})


def make_absent(
    like: Tensor,
    *,
    requires_grad: bool | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> FakeTensor:
    """A stand-in with the shape, strides, and (if not given) dtype and device of ``like`` and no storage.

    It is built without dispatching an operation, so there is no weak reference to it and its content can be swapped
    for real data later (``torch.utils.swap_tensors``).
    """
    if device is None:
        device = like.fake_device if isinstance(like, FakeTensor) else like.device
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=dtype or like.dtype, device="meta")
    return _fake_tensor(meta, device, like.requires_grad if requires_grad is None else requires_grad)


def make_absent_rows(like: Tensor, sparse_dim: int, dtype: torch.dtype) -> FakeTensor:
    """A stand-in for a sparse gradient of the shape of ``like``, with no rows: only its owners know how many."""
    with torch._C.DisableTorchFunction(), FAKE_MODE:
        shape, device = tuple(like.shape), like.fake_device if isinstance(like, FakeTensor) else like.device
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=device)
        rows = torch.empty((0, *shape[sparse_dim:]), dtype=dtype, device=device)
        absent: Any = torch.sparse_coo_tensor(indices, rows, shape, is_coalesced=True, check_invariants=False)
    return absent


def make_placeholder(value: Value, device: torch.device) -> FakeTensor:
    """A stand-in of the shape of one value of a step graph, on its device or else on ``device``."""
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
    """A stand-in for a parameter or buffer, of its full shape; a parameter stays an ``nn.Parameter``."""
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
    """The attributes that the user set on a tensor or parameter of any shape, absent or not."""
    attributes = tensor.__dict__
    stock = attributes.get(_BUILTIN, () if not is_absent(tensor) else attributes)
    return {n: v for n, v in attributes.items() if n not in stock and not n.startswith((MARK, "__"))}


def is_absent(value: Any) -> bool:
    """Whether ``value`` is a stand-in without content."""
    return isinstance(value, _ABSENT)


def drop(parameter: Tensor, device: torch.device | None = None) -> None:
    """Free the storage of ``parameter`` in place: the same object becomes absent and keeps the user's attributes.

    It may have any shape, and be on the meta device; it reports ``device`` from now on, its present one if None.
    """
    absent = make_absent_parameter(parameter, device)
    parameter.grad = None
    attributes = parameter.__dict__
    absent.__dict__[_BUILTIN] = {*absent.__dict__, _BUILTIN}
    swap_in_place(parameter, absent)
    parameter.__dict__.update(attributes)


def fill(absent: Tensor, content: Tensor) -> None:
    """Give an absent tensor its content, of any shape, in place; ``content`` must not be used afterwards."""
    before = absent.__dict__
    swap_in_place(absent, content)
    if _BUILTIN in before:
        absent.__dict__.update((name, value) for name, value in before.items() if name not in before[_BUILTIN])


def swap_in_place(first: Tensor, second: Tensor) -> None:
    """Swap two tensors of any shapes as ``torch.utils.swap_tensors``, also if weak references exist (``nn.LSTM`` has).

    These refer to the user's object, whose identity does not change.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)
    with torch._C.DisableTorchFunction():
        for tensor in (first, second):  # hooks are the objects', and torch calls those of what was swapped
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(tensor, hooks, getattr(tensor, hooks))


@contextlib.contextmanager
def absent_members(root: nn.Module, tracked: Collection[str]) -> Iterator[dict[int, str]]:
    """Replace parameters, and the buffers of the FQNs ``tracked``, by fresh stand-ins for a recording.

    What is yielded is the FQN by id of the stand-in; members that are one tensor share one, under the first name.
    """
    saved: list[tuple[Any, Any, Tensor]] = []
    stand_ins: dict[int, tuple[Tensor, str]] = {}
    owners: dict[nn.Module, None] = {}
    try:
        for prefix, module in root.named_modules():
            groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for members in groups:
                for name, original in members.items():
                    fqn = f"{prefix}.{name}" if prefix else name
                    if original is None or (members is module._buffers and fqn not in tracked):
                        continue
                    if id(original) not in stand_ins:
                        stand_ins[id(original)] = make_absent_parameter(original), fqn
                    saved.append((members, name, original))
                    members[name] = stand_ins[id(original)][0]
                    owners[module] = None
        for module in owners:
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


class ShardedTensorBase(Tensor):
    """A tensor that behaves as the full one, while this rank has a local shard."""

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """Gather the full plain tensor of this shape, differentiable; collective over the ranks that hold shards."""


def materialize(value: Any) -> Any:
    """The full tensor of a deferred tensor; other values unchanged."""
    return value.full_tensor() if isinstance(value, ShardedTensorBase) else value


def materialize_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with full tensors in place of deferred ones."""
    leaves, plain = flatten_call(args, kwargs)
    if not any(isinstance(leaf, ShardedTensorBase) for leaf in leaves):
        return args, kwargs
    return rebuild_call([materialize(leaf) for leaf in leaves], args, kwargs, plain)


class LazyFullTensor(ShardedTensorBase):
    """A tensor of the full shape that is gathered when its content is read."""

    _gathered: Tensor | None

    @staticmethod
    def __new__(cls, shard: Tensor, shape: tuple[int, ...]) -> LazyFullTensor:
        """Create it without a graph, in the forward of an autograd function; the backward gets the full gradient."""
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        lazy._gathered = None
        return lazy

    @abstractmethod
    def gather_shards(self) -> Tensor:
        """Gather the full tensor, of this shape, differentiable; collective over the ranks that hold shards."""

    def full_tensor(self) -> Tensor:
        """The full tensor, of the shape of this one, gathered once and cached."""
        if self._gathered is None:
            with torch._C.DisableTorchFunction():
                self._gathered = self.gather_shards()
        return self._gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in METADATA:  # everything else gathers the full tensor
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_materialized(args), **{key: _materialized(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_materialized(args), **{key: _materialized(value) for key, value in (kwargs or {}).items()})


def _materialized(value: Any) -> Any:
    if isinstance(value, LazyFullTensor):
        return value.full_tensor()
    if type(value) in (tuple, list):
        return type(value)(_materialized(item) for item in value)
    return value
