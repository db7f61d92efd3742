"""A fallback for operations without a fake kernel: one run on small real values.

A single kernel that refuses stand-ins without storage, or cannot infer the shape of its result, is run on zeros or
ones. Where Python reads a number inside a unit, such as how many tokens an expert got, the full unit is run on small
random values instead, so that its numbers agree with each other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
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

from lightning_hybrid.step.objects.deep_copy import copied
from lightning_hybrid.step.objects.pytree import flatten, map_leaves, tensors_inside, unflatten
from lightning_hybrid.step.standins.absent_tensors import FAKE_MODE, make_absent
from lightning_hybrid.step.standins.grouped_matrix_products import absent_grouped_mm

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
    return map_leaves(lambda leaf: make_absent(leaf) if isinstance(leaf, Tensor) else leaf, out)


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
    """The result of ``run`` on real values of the same shapes, made absent again.

    Args:
        run: The operation, or the forward of a unit.
        args: Its positional arguments; absent ones are replaced by small random values (integers by zeros).
        kwargs: Its keyword arguments, likewise.
        error: The error of the fake kernels; raised again if the real ones fail too.
        unit: The unit whose forward it is; if None, the object that ``run`` is a method of.
    """
    owner = getattr(run, "__self__", None) if unit is None else unit
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    try:
        return _run_on_stand_ins(run, args, kwargs, modules)
    except Exception as failure:
        if modules:
            raise error from failure
    try:
        return _run_on_stand_ins(run, args, kwargs, modules, positive=True)  # torch refuses negative variances
    except Exception as failure:
        raise error from failure


def _run_on_stand_ins(
    run: Callable[..., Any], args: Any, kwargs: Any, modules: list[nn.Module], *, positive: bool = False
) -> Any:
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
