"""Narrow copies of wide modules with experts, on which their shardings are proved in place of the modules.

A copy has its widths divided by one factor, and the same numbers of experts, ranks and rows. It takes the place of the
module only where both run the same program (`equivalence/shapes`), unsharded and on the first and the last rank:

    weights of experts, large other weights    fake tensors: no storage, and nothing is computed of them
    tokens, router, numbers of rows            real, and equal in both but for repeated features

So tokens choose the same experts in both. A module that reads values which depend on weights of experts has no copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.equivalence.copies import random_copy
from lightning_hybrid.equivalence.division import Division, copy_of_unit, divisions
from lightning_hybrid.equivalence.shapes import ShapeTrace, difference_but_width, why_not_same_program
from lightning_hybrid.experts.parallel.adapters import Call, ExpertsAdapter, is_float
from lightning_hybrid.experts.parallel.ranks import ExpertRanks, comparable, examples, prepared
from lightning_hybrid.experts.parallel.width import WidthSharding
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.kernels import NO_FAKE_KERNEL, absent_grouped_mm, quiet_fake_kernels
from lightning_hybrid.step.standins.tensors import FAKE_MODE, make_absent, swap_in_place

LEAST_NUMEL = 2**24  # parameters of a module that is worth a copy; smaller ones are proved in a second or two
_MOST_REAL_NUMEL = 2**22  # parameters of a weight beside the experts that has values
_MOST_COPIES = 6  # that are tried
_ALIGNED = 4  # numbers of 4 bytes: grouped products need rows of a multiple of 16 bytes
_Forwards = Callable[[int], Callable[..., Any]]  # by rank


class NarrowExperts:
    """A narrow copy of a module with experts that runs the same program.

    Attributes:
        module: The copy; parameters have no values.
        call: Arguments of a call of it, without values.
    """

    def __init__(self, full: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, division: Division) -> None:
        self._full_module, self._adapter, self._size, self._division = full, adapter, size, division
        self.module, self._full_call, self._dtype = copy_of_unit(full, division, with_values=True), call, torch.float64
        leaves, spec = flatten(call)
        self.call: Call = unflatten([self._divided(leaf) for leaf in leaves], spec)

    def _divided(self, leaf: Any) -> Any:
        """Divides the features, along the last dim, of a floating tensor."""
        if not is_float(leaf) or not leaf.dim():
            return leaf
        return torch.empty((*leaf.shape[:-1], self._division.of(leaf.shape[-1])), dtype=leaf.dtype, device="meta")

    def why_other_unsharded(self, dtype: torch.dtype, tensor_size: int) -> str:
        """Runs both unsharded, with floating numbers of one type; returns how their programs differ, or ""."""
        self._dtype = dtype
        self._full, self._narrow = self._with_fake_weights()
        wide, small = next(self._traces(lambda _: self._full.forward, lambda _: self._narrow.forward))
        return why_not_same_program(wide, small, self._division, tensor_size)

    def width_of_copy(self, width: WidthSharding) -> WidthSharding:
        """Returns a sharding over tensor ranks for the copy; a ValueError if a piece cannot be divided."""
        after = dict(self.module.named_parameters())
        placements = {name: shard.scaled_to(after[name].shape[shard.dim]) for name, shard in width.placements.items()}
        return replace(width, length=self._division.of(width.length), placements=placements)

    def why_another_program(self, width: WidthSharding, of_copy: WidthSharding) -> str:
        """Runs both on the first and the last rank, sharded; returns how their programs differ, "" if they do not."""
        try:
            full, narrow = self._sharded(self._full, width), self._sharded(self._narrow, of_copy)
            differences = (difference_but_width(*pair, self._division.factor) for pair in self._traces(full, narrow))
            return next(filter(None, differences), "")
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def runs_sharded(self, width: WidthSharding) -> bool:
        """Returns whether the module itself runs with a sharding over tensor ranks, on the first and the last rank."""
        try:
            full = self._sharded(self._full, width)
            for rank, example in self._examples():
                self._trace(full(rank), self._wide_call(example))
        except Exception:
            return False
        return True

    def _sharded(self, module: nn.Module, width: WidthSharding) -> _Forwards:
        ranks = ExpertRanks(module, self._adapter, self._size, width, computes_ends_only=True)
        return lambda rank: partial(ranks.call, rank % self._size)

    def _examples(self) -> Iterator[tuple[int, Call]]:
        return examples(self._adapter, self.call, self._size, 1, torch.Generator().manual_seed(0))

    def _traces(self, full: _Forwards, narrow: _Forwards) -> Iterator[tuple[ShapeTrace, ShapeTrace]]:
        """Yields the traces of the module and of the copy on the first and the last rank."""
        for rank, example in self._examples():
            yield self._trace(full(rank), self._wide_call(example)), self._trace(narrow(rank), example)

    def _trace(self, forward: Callable[..., Any], call: Call) -> ShapeTrace:
        _, _, (args, kwargs) = prepared(call, lambda leaf: leaf.to(self._dtype))
        trace, exact = ShapeTrace(), comparable(self._adapter, self._dtype)
        with ExitStack() as stack:
            for context in (quiet_fake_kernels(), _FakeKernels(), _FakeResults(), exact, trace):
                stack.enter_context(context)
            forward(*args, **kwargs)
        return trace

    def _with_fake_weights(self) -> tuple[nn.Module, nn.Module]:
        """Returns copies of the module and of the narrow copy whose large weights are fake; others are as wide."""
        narrow = random_copy(self.module, torch.Generator().manual_seed(0), self._dtype)
        of_full: dict[int, Any] = {}
        of_narrow: dict[int, Any] = {}
        experts, values = self._adapter.placements(self._full_module, 1), dict(narrow.named_parameters())
        for name, parameter in self._full_module.named_parameters():
            value = values[name]
            if name in experts or parameter.numel() > _MOST_REAL_NUMEL:
                with FAKE_MODE:
                    wide, small = (torch.empty(each.shape, dtype=value.dtype) for each in (parameter, value))
            else:
                wide, small = _widened(value.detach(), parameter.shape, is_weight=True), value.detach()
            of_full[id(parameter)] = nn.Parameter(wide, requires_grad=value.requires_grad)
            of_narrow[id(value)] = nn.Parameter(small, requires_grad=value.requires_grad)
        buffers = zip(self._full_module.buffers(), narrow.buffers(), strict=True)
        of_full |= {id(buffer): _widened(value, buffer.shape) for buffer, value in buffers}
        return copy.deepcopy(self._full_module, of_full), copy.deepcopy(narrow, of_narrow)

    def _wide_call(self, example: Call) -> Call:
        """Returns a call of the full module with the values of a call of the copy, whose features are repeated."""
        leaves, spec = flatten(example)
        pairs = zip(flatten(self._full_call)[0], flatten(self.call)[0], strict=True)
        repeats = [_repeats(wide.shape, small.shape) if is_float(wide) else () for wide, small in pairs]
        wide = [_repeated(leaf, times) if times else leaf for leaf, times in zip(leaves, repeats, strict=True)]
        call: Call = unflatten(wide, spec)
        return call


class NarrowCopies:
    """The narrow copies of one module that run its program unsharded, one after the other.

    Attributes:
        current: The copy that takes its place now; None if it is small, or all were refused.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: ExpertsAdapter,
        call: Call,
        sizes: tuple[int, int],
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        """Makes the first copy; of the types of floating numbers, the first one in which it runs is taken.

        ``sizes`` are the numbers of expert-parallel ranks and of tensor ranks.
        """
        self._reason, is_large = "", sum(parameter.numel() for parameter in module.parameters()) >= LEAST_NUMEL
        self._others = self._copies(module, adapter, call, sizes, dtypes) if is_large else iter(())
        self.current = next(self._others, None)

    def _copies(
        self, module: nn.Module, adapter: ExpertsAdapter, call: Call, sizes: tuple[int, int], dtypes: Any
    ) -> Iterator[NarrowExperts]:
        try:
            found = _ordered_divisions(module, adapter, call, sizes[1])
        except Exception as error:
            self._reason = f"{type(error).__name__}: {error}"
            return
        self._reason = "" if found else "no width can be divided"
        for division in found:
            for dtype in dtypes:
                try:
                    narrow = NarrowExperts(module, adapter, call, sizes[0], division)
                    difference = narrow.why_other_unsharded(dtype, sizes[1])
                except Exception as error:
                    difference = f"{type(error).__name__}: {error}"
                if not difference:
                    self._reason = ""
                    yield narrow
                    break
                self._reason = self._reason or difference

    def refuse(self, reason: str) -> None:
        """Goes on to the next copy, since the current one cannot take the place of the module."""
        self.current = next(self._others, None)
        self._reason = self._reason or reason

    @property
    def why_none(self) -> str:
        """Why no copy takes the place of the module; "" if one does, or the module is small."""
        return "" if self.current is not None else self._reason


def _ordered_divisions(module: nn.Module, adapter: ExpertsAdapter, call: Call, tensor_size: int) -> list[Division]:
    """Divisions, those whose shards have aligned rows first: kernels refuse others."""
    shapes = [parameter.shape[1:] for parameter in module.parameters() if parameter.dim() > 1]

    def is_unlikely(division: Division) -> bool:
        lengths = {division.of(n) for shape in shapes for n in shape if n in division.sizes}
        return adapter.num_experts in lengths or any(n % (_ALIGNED * tensor_size) for n in lengths)

    found = divisions(module, flatten(call)[0], tensor_size, {adapter.num_experts})
    return sorted(found, key=is_unlikely)[:_MOST_COPIES]


class _FakeResults(TorchFunctionMode):
    """Lets operations mix fake tensors and real ones.

    A real tensor that a fake one is written to becomes fake, and a fake one is indexed by numbers in place of a mask.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _writes(name) or "out" in kwargs:
            leaves = flatten((args, kwargs))[0]
            if any(map(_is_fake, leaves)):
                _make_fake(kwargs["out"] if "out" in kwargs else args[0], name)
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], FakeTensor):
            args = args[0], _by_numbers(args[1]), *args[2:]
        return func(*args, **kwargs)


class _FakeKernels(TorchDispatchMode):
    """Runs kernels with a fake argument on fake ones only; grouped products get a kernel for the dtypes of CPUs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = flatten((args, kwargs or {}))
        if not any(map(_is_fake, leaves)):
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable and not isinstance(leaves[0], FakeTensor):
            raise ValueError(f"{func} writes results of experts to another tensor")
        fake = [make_absent(leaf) if isinstance(leaf, Tensor) and not _is_fake(leaf) else leaf for leaf in leaves]
        args, kwargs = unflatten(fake, spec)
        try:
            return func(*args, **kwargs)
        except NO_FAKE_KERNEL:
            known = absent_grouped_mm(func, args, kwargs)
            if known is None:
                raise
            return known


def _is_fake(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor)


def _writes(name: str) -> bool:
    return name in ("__setitem__",) or (name.endswith("_") and not name.endswith("__")) or name[:3] == "__i"


def _make_fake(target: Any, name: str) -> None:
    if not isinstance(target, Tensor) or isinstance(target, FakeTensor):
        return
    if target._is_view() or target.grad_fn is not None or target.requires_grad:
        raise ValueError(f"{name} writes results of experts to a view or a tensor with a gradient")
    swap_in_place(target, make_absent(target))


def _by_numbers(index: Any) -> Any:
    """An index with the numbers of a real mask's true elements in place of the mask."""
    found: list[Any] = []
    for part in index if type(index) is tuple else (index,):
        is_mask = isinstance(part, Tensor) and not isinstance(part, FakeTensor) and part.dtype is torch.bool
        found.extend(part.nonzero(as_tuple=True) if is_mask else (part,))
    return tuple(found) if type(index) is tuple or len(found) != 1 else found[0]


def _repeats(wide: torch.Size, narrow: torch.Size) -> tuple[int, ...]:
    return tuple(a // b if b else 1 for a, b in zip(wide, narrow, strict=True))


def _repeated(tensor: Tensor, times: tuple[int, ...]) -> Tensor:
    for dim, number in enumerate(times):
        tensor = tensor.repeat_interleave(number, dim) if number > 1 else tensor
    return tensor


def _widened(tensor: Tensor, shape: torch.Size, *, is_weight: bool = False) -> Tensor:
    """A tensor whose elements are repeated to a shape; a weight's products with repeated features stay equal."""
    times = _repeats(shape, tensor.shape)
    scale = max(times) if is_weight and tensor.dim() > 1 and tensor.is_floating_point() else 1
    return _repeated(tensor, times).clone() / scale if scale > 1 else _repeated(tensor, times).clone()
