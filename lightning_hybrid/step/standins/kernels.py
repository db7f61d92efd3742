"""Kernels on stand-ins: shapes of attention and of grouped products, and what runs where a kernel refuses them.

The kernels of grouped matrix products (``torch.nn.functional.grouped_mm``) without data need bfloat16. Kernels of the
CPU take float32 and float16 too, so layers of experts run where their stand-ins would not.

A fallback for operations without a fake kernel: one run on small real values.

A single kernel that refuses stand-ins without storage, or cannot infer the shape of its result, is run on zeros or
ones. Where Python reads a number inside a unit, such as how many tokens an expert got, the full unit is run on small
random values instead, so that its numbers agree with each other.

Attention without torch's fused inference kernels, in recordings and in trials: `slow_attention`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.autograd.graph import increment_version
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.objects.pytree import flatten, map_leaves, map_tensors, tensors_inside, unflatten
from lightning_hybrid.step.standins.tensors import FAKE_MODE, make_absent

_ATEN = torch.ops.aten
_FUSED = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
}
_PRODUCTS, _SOFTMAX = {_ATEN.bmm, _ATEN.baddbmm}, {_ATEN._softmax, _ATEN._safe_softmax}


class AttentionHeads(TorchDispatchMode):
    """Observes kernels of attention: fused ones, and a softmax between two batched products.

    Scores are ``[batch, heads, queries, keys]``, or ``[batch * heads, queries, keys]`` as in ``nn.MultiheadAttention``.
    Where several heads of queries read the same keys, those are expanded, or the kernel gets fewer of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scores: set[tuple[int, int]] = set()  # batch and queries of products
        self._softmax: dict[tuple[int, int], tuple[set[int], int]] = {}  # of such scores, that no product has read
        self._heads: set[int] = set()
        self._batched_heads: set[int] = set()  # times the number of samples
        self._keys: set[tuple[int, int]] = set()  # heads of queries and of keys
        self._expanded: set[tuple[int, int]] = set()  # heads of keys, and how often each is read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe one kernel."""
        out = func(*args, **(kwargs or {}))
        kernel = func._overloadpacket
        if kernel in _FUSED:
            queries, keys = args[0].shape[1], args[1].shape[1]
            self._heads.add(queries)
            self._keys.add((queries, keys))
        elif kernel in _PRODUCTS:
            size = out.shape[0], out.shape[1]
            self._scores.add(size)
            if size in self._softmax:
                found, heads = self._softmax.pop(size)
                found.add(heads)
        elif kernel in _SOFTMAX:
            self._observe_softmax(args[0], args[1])
        elif kernel is _ATEN.expand and out.dim() == 5 and args[0].dim() == 5 and args[0].shape[2] == 1:
            self._expanded.add((out.shape[1], out.shape[2]))
        return out

    def _observe_softmax(self, scores: Tensor, dim: int) -> None:
        if dim not in (-1, scores.dim() - 1) or scores.dim() not in (3, 4):
            return
        size = scores.shape[:-2].numel(), scores.shape[-2]
        if size in self._scores:
            self._softmax[size] = self._heads if scores.dim() == 4 else self._batched_heads, scores.shape[-3]

    def common_numbers(self, samples: int) -> tuple[int | None, int | None]:
        """Return the largest numbers that divide all numbers of heads, and all of keys; None without attention."""
        several = {number for number in self._batched_heads if number > samples and number % samples == 0}
        heads = self._heads | {number // samples for number in several}
        keys = {own for queries, own in self._keys if own < queries}
        keys |= {own for own, times in self._expanded if times > 1 and own * times in heads}
        return _common(heads), _common(heads | keys)


def _common(numbers: Iterable[int]) -> int | None:
    return math.gcd(*numbers) or None


_KERNEL = torch.ops.aten._grouped_mm.default
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class GroupedProductShapes(TorchDispatchMode):
    """Inside, grouped products of meta tensors run in each dtype of the CPU's kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = None
        if func is _KERNEL and args[0].is_meta:
            known = absent_grouped_mm(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if known is None else known


def absent_grouped_mm(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a grouped matrix product without data: on the meta device, or absent if an argument is.

    Matrices are [M, K] and [K, N], of which some have a first dim of groups. Of two without, K is in groups. None for
    another kernel, and for arguments that the kernel of the CPU refuses.
    """
    if func is not _KERNEL or len(args) < 2 or kwargs.get("out_dtype") or any(each is not None for each in args[3:]):
        return None
    first, second = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if first.dtype != second.dtype or first.dtype not in _DTYPES or first.shape[-1] != second.shape[-2]:
        return None
    groups: tuple[int, ...] = ()
    if first.dim() == second.dim() == 3:
        groups = tuple(first.shape[:1])
    elif first.dim() == second.dim() == 2 and isinstance(offsets, Tensor):
        groups = tuple(offsets.shape)
    with torch._C._DisableTorchDispatch():
        like = torch.empty((*groups, first.shape[-2], second.shape[-1]), dtype=first.dtype, device="meta")
    absent = next((each for each in (first, second) if isinstance(each, FakeTensor)), None)
    return like if absent is None else make_absent(like, device=absent.fake_device, requires_grad=False)


NO_FAKE_KERNEL = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
    RuntimeError,
)


def run_kernel_on_stand_ins(func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
    """The absent result of one kernel on real zeros, or on ones if the result's shape is a count of nonzeros.

    The ``error`` of the fake kernel is raised again if the real kernel fails too, or writes its arguments.
    """
    known = absent_grouped_mm(func, args, kwargs)
    if known is not None:
        return known
    leaves, spec = flatten((args, kwargs))
    absent = {id(leaf): leaf for leaf in leaves if isinstance(leaf, FakeTensor)}
    if isinstance(error, DataDependentOutputException) or func._schema.is_mutable or not absent:
        raise error
    value = 1 if isinstance(error, DynamicOutputShapeException) else 0
    real = {key: _constant_tensor(leaf, value) for key, leaf in absent.items()}
    try:
        real_args, real_kwargs = unflatten([real.get(id(leaf), leaf) for leaf in leaves], spec)
        out = func(*real_args, **real_kwargs)
    except Exception as failure:
        raise error from failure
    return map_tensors(make_absent, out)


def _constant_tensor(tensor: FakeTensor, value: int) -> Tensor:
    """A real tensor of this shape and strides; zeros take no memory until they are written."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.zeros(max(size, 1), dtype=tensor.dtype, device=tensor.fake_device)
    return (flat.fill_(value) if value else flat).as_strided(tensor.shape, tensor.stride())


@contextlib.contextmanager
def quiet_fake_kernels() -> Iterator[None]:
    """Silence torch's log of failed fake kernels, which are expected here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def run_on_stand_ins(
    run: Callable[..., Any], args: Any, kwargs: Any, error: Exception, unit: nn.Module | None = None
) -> Any:
    """The result of ``run`` on small random values (integers: zeros) of the same shapes, made absent again.

    ``unit`` is the unit whose forward ``run`` is; if None, the object that it is a method of. The ``error`` of the fake
    kernels is raised again if the real ones fail too.
    """
    owner = getattr(run, "__self__", None) if unit is None else unit
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    try:
        return run_on_real_values(run, args, kwargs, modules)
    except Exception as failure:
        if modules:
            raise error from failure
    try:
        return run_on_real_values(run, args, kwargs, modules, positive=True)  # torch refuses negative variances
    except Exception as failure:
        raise error from failure


def run_on_real_values(
    run: Callable[..., Any], args: Any, kwargs: Any, modules: list[nn.Module], *, positive: bool = False
) -> Any:
    """The result of ``run`` on small random values (integers: zeros) of the same shapes, made absent again.

    Parameters and buffers of ``modules`` are replaced likewise; with ``positive`` all floating values are.
    """
    memo: dict[int, Tensor] = {}
    saved = []
    for module in modules:
        groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for members in groups:
            for member, tensor in members.items():
                if isinstance(tensor, FakeTensor):
                    saved.append((members, member, tensor))
                    members[member] = _stand_in(tensor, memo, positive=positive)
    leaves, spec = flatten((args, kwargs))
    inputs = [_stand_in(leaf, memo, positive=positive) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
    versions = [(real, real._version, leaf) for real, leaf in zip(inputs, leaves, strict=True) if real is not leaf]
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # small random values are not valid probabilities
    try:
        real_args, real_kwargs = unflatten(inputs, spec)
        out = run(*real_args, **real_kwargs)
    finally:
        Distribution.set_default_validate_args(checks)
        for members, member, tensor in saved:
            members[member] = tensor
    for leaf in {id(leaf): leaf for real, version, leaf in versions if real._version != version}.values():
        increment_version(leaf)  # the stand-in of a tensor that was written in place
    originals = {id(real): leaf for real, leaf in zip(inputs, leaves, strict=True)}

    def made_absent(leaf: Any) -> Any:
        if id(leaf) in originals:
            return originals[id(leaf)]
        if isinstance(leaf, Tensor):
            absent = make_absent(leaf)
            if not absent.requires_grad:
                return absent
            with torch._C.DisableTorchFunction(), torch.enable_grad(), FAKE_MODE:
                return absent.clone()  # not a leaf, so that the step may write into it
        # An object of another class, such as a distribution, may contain values of the step as well.
        return copied(leaf, made_absent, modules=False) if tensors_inside(leaf) else leaf

    return map_leaves(made_absent, out)


def _stand_in(tensor: Tensor, memo: dict[int, Tensor], *, positive: bool) -> Tensor:
    if id(tensor) not in memo:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        real = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.is_floating_point() or tensor.is_complex():
            generator = torch.Generator(device).manual_seed(0)
            real.normal_(0.0, 0.02, generator=generator)
            if positive and tensor.is_floating_point():
                real.abs_()
        real.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
    return memo[id(tensor)]


class _Users:
    """How many blocks of any thread are inside, and whether the kernels were enabled before the first."""

    lock = threading.Lock()
    number, was_enabled = 0, True

    @classmethod
    def enter(cls) -> None:
        """Disable the kernels for one more block."""
        with cls.lock:
            if not cls.number:
                cls.was_enabled = torch.backends.mha.get_fastpath_enabled()
            cls.number += 1
            torch.backends.mha.set_fastpath_enabled(False)

    @classmethod
    def leave(cls) -> None:
        """End one block."""
        with cls.lock:
            cls.number -= 1
            if not cls.number:
                torch.backends.mha.set_fastpath_enabled(cls.was_enabled)


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Disable the fused inference kernels of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``.

    These cannot be recorded: with attention weights requested or under autocast their results on stand-ins differ from
    those of a run, and an encoder reads the content of its mask and passes nested tensors between its layers. They also
    take numbers in masks for true and false. Torch has one switch for all threads; the last block that ends sets it
    back.
    """
    _Users.enter()
    try:
        yield
    finally:
        _Users.leave()
