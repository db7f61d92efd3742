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
from lightning_hybrid.equivalence.deterministic import DeterministicMode
from lightning_hybrid.equivalence.division import Division, copy_of_unit, divisions
from lightning_hybrid.equivalence.shapes import ShapeTrace, difference_but_width, why_not_same_program
from lightning_hybrid.experts.parallel.batched_expert_adapters import Call, ExpertsAdapter, is_float
from lightning_hybrid.experts.parallel.expert_ranks_in_one_process import ExpertRanks
from lightning_hybrid.experts.parallel.expert_tensor_parallel import WidthSharding
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.kernels import NO_FAKE_KERNEL, absent_grouped_mm, quiet_fake_kernels
from lightning_hybrid.step.standins.tensors import FAKE_MODE, make_absent, swap_in_place

LEAST_NUMEL = 2**24  # parameters of a module that is worth a copy; smaller ones are proved in a second or two
_MOST_REAL_NUMEL = 2**22  # parameters of a weight beside the experts that has values
_MOST_COPIES = 6  # that are tried
_ALIGNED = 4  # numbers of 4 bytes: grouped products need rows of a multiple of 16 bytes


class NarrowExperts:
    """A narrow copy of a module with experts that runs the same program.

    Attributes:
        module: The copy; parameters have no values.
        call: Arguments of a call of it, without values.
    """

    def __init__(self, full: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, division: Division) -> None:
        self._full_module, self._adapter, self._size, self._division = full, adapter, size, division
        self.module, self.call = copy_of_unit(full, division, with_values=True), _narrow_call(call, division)
        self._full_call = call
        self._dtype = torch.float64

    def why_other_unsharded(self, dtype: torch.dtype, tensor_size: int) -> str:
        """Runs both unsharded, with floating numbers of one type; returns how their programs differ, or ""."""
        self._dtype = dtype
        self._full, self._narrow = self._with_fake_weights()
        wide, small = next(self._traces(lambda _: self._full.forward, lambda _: self._narrow.forward))
        return why_not_same_program(wide, small, self._division, tensor_size)

    def width_of_copy(self, width: WidthSharding) -> WidthSharding:
        """Returns a sharding over tensor ranks for the copy.

        Raises:
            ValueError: A piece cannot be divided.
        """
        after = dict(self.module.named_parameters())
        placements = {name: shard.scaled_to(after[name].shape[shard.dim]) for name, shard in width.placements.items()}
        return replace(width, length=self._division.of(width.length), placements=placements)

    def why_another_program(self, width: WidthSharding | None, of_copy: WidthSharding | None) -> str:
        """Runs both on the first and the last rank, sharded; returns how their programs differ, "" if they do not.

        Args:
            width: Sharding of each expert of the module over tensor ranks, if any.
            of_copy: That of the copy.
        """
        try:
            full, narrow = self._sharded(self._full, width), self._sharded(self._narrow, of_copy)
            differences = (difference_but_width(*pair, self._division.factor) for pair in self._traces(full, narrow))
            return next(filter(None, differences), "")
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def runs_sharded(self, width: WidthSharding | None) -> bool:
        """Returns whether the module itself runs with a sharding over tensor ranks, on the first and the last rank."""
        try:
            full = self._sharded(self._full, width)
            for rank, example in self._examples():
                self._trace(full(rank), self._wide_call(example))
        except Exception:
            return False
        return True

    def _sharded(self, module: nn.Module, width: WidthSharding | None) -> Callable[[int], Callable[..., Any]]:
        ranks = ExpertRanks(module, self._adapter, self._size, width, computes_ends_only=True)
        return lambda rank: partial(ranks.call, rank % self._size)

    def _examples(self) -> Iterator[tuple[int, Call]]:
        generator, size = torch.Generator().manual_seed(0), max(2, self._size)
        for rank in (0, size - 1):
            yield rank, self._adapter.example(self.call, rank, size, generator)

    def _traces(
        self, full_of: Callable[[int], Callable[..., Any]], narrow_of: Callable[[int], Callable[..., Any]]
    ) -> Iterator[tuple[ShapeTrace, ShapeTrace]]:
        """Yields the traces of the module and of the copy on the first and the last rank."""
        for rank, example in self._examples():
            yield self._trace(full_of(rank), self._wide_call(example)), self._trace(narrow_of(rank), example)

    def _trace(self, forward: Callable[..., Any], call: Call) -> ShapeTrace:
        leaves, spec = flatten(call)
        leaves = [leaf.to(self._dtype) if is_float(leaf) else leaf for leaf in leaves]
        args, kwargs = unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        trace, exact = ShapeTrace(), DeterministicMode(self._dtype)
        before, self._adapter.again = self._adapter.again, exact.redrawn_afterwards()
        try:
            with ExitStack() as stack:
                for context in (quiet_fake_kernels(), _FakeKernels(), _FakeResults(), exact, trace):
                    stack.enter_context(context)
                forward(*args, **kwargs)
        finally:
            self._adapter.again = before
        return trace

    def _with_fake_weights(self) -> tuple[nn.Module, nn.Module]:
        """Returns copies of the module and of the narrow copy whose large weights are fake; others are as wide."""
        narrow = random_copy(self.module, torch.Generator().manual_seed(0), self._dtype)
        of_narrow: dict[int, Any] = {}
        pair: tuple[Tensor, Tensor]
        of_full: dict[int, Any] = {}
        experts = self._adapter.placements(self._full_module, 1)
        values = dict(narrow.named_parameters())
        for name, parameter in self._full_module.named_parameters():
            value = values[name]
            if name in experts or parameter.numel() > _MOST_REAL_NUMEL:
                pair = _fake(parameter.shape, value.dtype), _fake(value.shape, value.dtype)
            else:
                pair = _widened(value.detach(), parameter.shape, is_weight=True), value.detach()
            for memo, original, tensor in zip((of_full, of_narrow), (parameter, value), pair, strict=True):
                memo[id(original)] = nn.Parameter(tensor, requires_grad=value.requires_grad)
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
    """The narrow copies of one module, in the order in which they are tried.

    Attributes:
        reason: Why the copies so far cannot take the place of the module; "" if it is small or none was refused.
    """

    def __init__(
        self,
        module: nn.Module,
        adapter: ExpertsAdapter,
        call: Call,
        sizes: tuple[int, int],
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        """Makes no copy yet.

        Args:
            module: The module, with full parameters; its weights are not read.
            adapter: Its adapter.
            call: Recorded arguments of a call.
            sizes: Number of expert-parallel ranks, and of tensor ranks.
            dtypes: Types of floating numbers, to be tried in turn.
        """
        self.reason = ""
        self._arguments = module, adapter, call, sizes[0]
        self._tensor_size, self._dtypes = sizes[1], dtypes
        is_large = sum(parameter.numel() for parameter in module.parameters()) >= LEAST_NUMEL
        self._divisions = self._ordered_divisions() if is_large else []

    def _ordered_divisions(self) -> list[Division]:
        """Divisions, those whose shards have aligned rows first: kernels refuse others."""
        module, adapter, call, _ = self._arguments
        try:
            found = list(divisions(module, flatten(call)[0], self._tensor_size, {adapter.num_experts}))
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            return []
        self.reason = "" if found else "no width can be divided"
        shapes = [parameter.shape[1:] for parameter in module.parameters() if parameter.dim() > 1]

        def is_unlikely(division: Division) -> bool:
            lengths = {division.of(n) for shape in shapes for n in shape if n in division.sizes}
            return adapter.num_experts in lengths or any(n % (_ALIGNED * self._tensor_size) for n in lengths)

        return sorted(found, key=is_unlikely)[:_MOST_COPIES]

    def find(self) -> NarrowExperts | None:
        """Returns the next copy that runs the module's program unsharded, if there is one."""
        while self._divisions:
            division = self._divisions.pop(0)
            for dtype in self._dtypes:
                try:
                    narrow = NarrowExperts(*self._arguments, division)
                    difference = narrow.why_other_unsharded(dtype, self._tensor_size)
                except Exception as error:
                    difference = f"{type(error).__name__}: {error}"
                if not difference:
                    self.reason = ""
                    return narrow
                self.reason = self.reason or difference
        return None

    def refuse(self, reason: str) -> NarrowExperts | None:
        """Gives the reason why the latest copy cannot take the place of the module; returns the next copy."""
        found, self.reason = self.find(), self.reason or reason
        return found


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


def _narrow_call(call: Call, division: Division) -> Call:
    """A call whose features, along the last dim of each floating tensor, are divided."""
    leaves, spec = flatten(call)
    narrow: Call = unflatten([_narrow_leaf(leaf, division) for leaf in leaves], spec)
    return narrow


def _narrow_leaf(leaf: Any, division: Division) -> Any:
    if not is_float(leaf) or not leaf.dim():
        return leaf
    return torch.empty((*leaf.shape[:-1], division.of(leaf.shape[-1])), dtype=leaf.dtype, device="meta")


def _fake(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    with FAKE_MODE:
        return torch.empty(shape, dtype=dtype)


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
