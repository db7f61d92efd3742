"""Small example inputs for a unit, made from its inputs in the recorded step.

Sizes that do not depend on the weights (batch, positions) become small primes that are no multiples of each other or of
the number of ranks. So a trial takes milliseconds, and they differ from each feature size of the full or sharded unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.objects.pytree import Spec, flatten, unflatten

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83)
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Example:
    """The arguments of one call of a unit."""

    leaves: tuple[Any, ...]  # the flattened arguments; floating tensors have the dtype of the proof
    spec: Spec | None  # the structure of the arguments

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Makes args and kwargs of one run, and the inputs that need a gradient by leaf index; shapes of the leaves."""
        fresh: list[Any] = []
        inputs: dict[int, Tensor] = {}
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                value = leaf.detach().clone()
                if leaf.requires_grad:
                    inputs[index] = value.requires_grad_()
                    # A unit's input is no leaf of autograd: it may be changed in place.
                    value = value.view_as(value) if torch.is_grad_enabled() else value
                fresh.append(value)
            else:
                fresh.append(leaf if isinstance(leaf, PLAIN) else copied(leaf))
        args, kwargs = unflatten(fresh, self.spec)
        return args, kwargs, inputs


def make_example(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unit: nn.Module,
    size: int,
    runs: Callable[[Example], bool],
    generator: torch.Generator,
    dtype: torch.dtype,
    least: int = 1,
    *,
    widths: Collection[int] | None = None,
) -> Example | None:
    """Makes an example with small sizes on which the unit runs; None if it does not run on its recorded inputs.

    No size is a multiple of the number of ranks without need. Each rank that the sequence is sharded over must have one
    position, which `least` says; two where another dim comes first, since many sizes are 1. For a run on fake tensors
    `widths` are sizes that stay, beside those of weights: leaves keep their dtype, and those without data get none.
    """
    leaves, spec = flatten((args, kwargs))
    real = [_with_real_tensors(leaf, generator, dtype) if widths is None else _detached(leaf) for leaf in leaves]
    needs = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in real)
    if not needs:
        first = next((leaf for leaf in real if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
        if first is not None:
            first.requires_grad_()
    weights = {length for p in (*unit.parameters(), *unit.buffers()) for length in p.shape} | {*(widths or ())}

    tensors = [leaf for leaf in real if isinstance(leaf, Tensor)]

    def example(sizes: Mapping[int, _Resize]) -> Example:
        return Example(tuple(_resized(leaf, sizes) if isinstance(leaf, Tensor) else leaf for leaf in real), spec)

    small = _small_lengths(_lengths(real, weights), _mask_lengths(leaves), weights, size, least)
    if widths is not None:  # numbers of positions that equal a width, which the last dim holds
        apart = {length: _Resize(new, _NOT_LAST if length in weights else _EVERY_DIM) for length, new in small.items()}
        if runs(example(apart)):
            return example(apart)

    def with_resize(length: int, sizes: Mapping[int, _Resize], *spared_dims: range) -> Mapping[int, _Resize]:
        for spared in spared_dims:
            resize = _Resize(small[length], spared)
            attempt = {**sizes, length: resize}
            if any(resize.dims(leaf, length) for leaf in tensors) and runs(example(attempt)):
                return attempt
        return sizes

    found: Mapping[int, _Resize] = {n: _Resize(new, _EVERY_DIM) for n, new in small.items() if n not in weights}
    # Thousands of positions may be as many as features of a weight; features are in the last dim of activations.
    for length in small:
        if length > _LONG and length in weights:
            found = with_resize(length, found, _NOT_LAST, _NOT_LAST_OF_THREE, _NOT_LAST_OF_FEW)
    if runs(example(found)):
        return example(found)
    # One of them may depend on the weights after all (features per head), or equal a number of features by chance.
    found = {}
    for length in small:
        found = with_resize(length, found, _EVERY_DIM, _NOT_LAST, _NOT_LAST_OF_THREE, _NOT_LAST_OF_FEW)
    return example(found) if runs(example(found)) else None


def _small_lengths(lengths: list[int], masked: set[int], weights: set[int], size: int, least: int) -> dict[int, int]:
    """Assigns a small prime to each length that can be replaced by one."""
    enough = [prime for prime in _PRIMES if prime >= least] or [*_PRIMES[-1:]]
    primes = [prime for prime in enough if prime % size and size % prime and prime not in weights] or enough
    further = [prime for prime in primes[1:] if prime >= 2 * least] or primes
    small: dict[int, int] = {}
    for length in lengths:
        fitting = [prime for prime in (further if small else primes) if prime <= length or length not in masked]
        unused = [prime for prime in fitting if prime not in small.values()] or fitting
        if unused:
            small[length] = unused[0]
    return small


def spread_rows(example: Example, lengths: Iterable[int], runs: Callable[[Example], bool]) -> Example:
    """Spreads the integers of an example over the vocabularies, so that each rank looks up some of its rows.

    Integers with another meaning (positions), with which the unit does not run then, stay unchanged.
    """
    for length in sorted(lengths, reverse=True):
        for index, leaf in enumerate(example.leaves):
            if not isinstance(leaf, Tensor) or leaf.dtype is not torch.int64 or leaf.numel() < 2:
                continue
            rows = torch.linspace(0, length - 1, leaf.numel(), dtype=torch.float64).long()
            # Neighbours far apart: each slice of positions has rows of several ranks.
            rows = rows[torch.arange(leaf.numel()) * _STEP % leaf.numel()].view(leaf.shape)
            leaves = (*example.leaves[:index], rows, *example.leaves[index + 1 :])
            if runs(replace(example, leaves=leaves)):
                example = replace(example, leaves=leaves)
    return example


_STEP = 7919


class _Resize(NamedTuple):
    """The new length of a size, and the tensors whose last dim keeps it."""

    length: int
    spared: range  # numbers of dims of these tensors

    def dims(self, tensor: Tensor, length: int) -> list[int]:
        """The dims of this length that are resized in a tensor."""
        last = tensor.dim() - 1 if tensor.dim() in self.spared else tensor.dim()
        return [dim for dim in range(min(last, tensor.dim())) if tensor.shape[dim] == length]


_EVERY_DIM, _NOT_LAST, _NOT_LAST_OF_FEW = range(0), range(99), range(4)
_NOT_LAST_OF_THREE = range(3, 4)  # positions of (samples, positions, features), and both dims of a mask
_LONG = 128  # shorter ones cost a trial little


def _lengths(leaves: list[Any], weights: set[int]) -> list[int]:
    """The sizes of the inputs, first the ones that are no size of a weight."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found = dict.fromkeys(length for tensor in tensors for length in tensor.shape if length > 1)
    return sorted(found, key=lambda length: length in weights)


def _mask_lengths(leaves: list[Any]) -> set[int]:
    """Sizes of square masks (a row and a column for each position), which must not grow: that would change the mask."""
    known = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not _has_no_data(leaf)]
    return {length for tensor in known for length in tensor.shape if tensor.shape.count(length) > 1}


def _has_no_data(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _resized(tensor: Tensor, sizes: Mapping[int, _Resize]) -> Tensor:
    needs, tensor = tensor.requires_grad, tensor.detach()
    found = [
        (new.length / length, dim, new.length) for length, new in sizes.items() for dim in new.dims(tensor, length)
    ]
    for _, dim, length in sorted(found):  # growing dims last
        tensor = tensor.index_select(dim, torch.arange(length, device=tensor.device) % tensor.shape[dim])
    return tensor.requires_grad_(needs)


def _detached(tensor: Any) -> Any:
    """A tensor, or a meta tensor of its shape if it has no data, outside of the graph; other leaves as they are."""
    if not isinstance(tensor, Tensor):
        return tensor
    value = tensor.detach()
    if _has_no_data(tensor):
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return value.requires_grad_(tensor.requires_grad)


def _with_real_tensors(leaf: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return _real(leaf, generator, dtype)
    if isinstance(leaf, PLAIN):
        return leaf
    # Fake tensors inside an object too: threads cannot share their kernels.
    return copied(leaf, lambda tensor: _real(tensor, generator, dtype).detach())


def _real(tensor: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    floating = tensor.is_floating_point()
    dtype = dtype if floating else tensor.dtype
    if not _has_no_data(tensor):
        value = tensor.detach().to("cpu", dtype)
    elif floating or tensor.is_complex():
        drawn_dtype = torch.promote_types(dtype, torch.float64)
        value = torch.randn(tensor.shape, dtype=drawn_dtype, generator=generator).to(dtype)
    else:
        value = torch.full(tensor.shape, dtype is torch.bool, dtype=dtype)
    return value.requires_grad_(tensor.requires_grad)
