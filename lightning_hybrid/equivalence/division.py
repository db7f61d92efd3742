"""The choice of the sizes of a wide layer that are divided by one factor, so that a narrow copy runs the same program.

    hidden 4096, feed-forward 14336, keys 1024, features per head 128    factor 8: 512, 1792, 128, 16
    heads 32, key heads 8, experts, vocabulary                           unchanged

The ranks can shard both a size and its quotient, in as many pieces, or neither.

Copies of a unit of fake tensors, at its own width or divided, and of its arguments.

A tensor is divided along a dim by taking the first of each block of numbers: rank 1 of 2 has the second half of both
the full and the divided one, and the third head has the third block.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.standins.tensors import FAKE_MODE

FACTORS = (2, 4, 8, 16, 32, 64)
_MOST_NUMEL = 2**22  # parameters of a copy that is narrow enough
_LEAST_SIZE = 4  # of a divided size: below, different values become equal or vanish
_MULTIPLES = (1, 2, 3)  # of the ranks; fused projections have two or three pieces
# In names of numbers that are no width.
_COUNTS = ("head", "expert", "group", "bucket", "layer", "position", "token", "embeddings")
_WIDTHS = ("dim", "size", "width", "features", "channels")


@dataclass(frozen=True)
class Division:
    """Sizes that are divided by a factor."""

    factor: int  # a power of two
    sizes: frozenset[int]  # the sizes

    def of(self, size: int) -> int:
        """The size in the narrow copy."""
        return size // self.factor if size in self.sizes else size

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The shape of a tensor in the narrow copy."""
        return tuple(map(self.of, shape))

    def attribute(self, name: str, value: Any) -> Any:
        """The value of an attribute in the narrow copy: numbers named as widths, or without a telling name."""
        if _is_count(name):
            return value
        if type(value) is int:
            return self.of(value)
        if type(value) in (tuple, list, torch.Size) and all(type(item) is int for item in value):
            return type(value)(map(self.of, value))
        return value


def divisions(unit: nn.Module, leaves: Iterable[Any], size: int, kept: Collection[int]) -> Iterator[Division]:
    """Yields divisions to try: first by the smallest factor that makes the copy narrow enough.

    ``size`` is the number of tensor ranks times context ranks; sizes of ``kept`` (of vocabularies) are not divided.
    """
    shapes = [tuple(parameter.shape) for parameter in unit.parameters()]
    widths = {length for shape in shapes for length in shape} - set(kept)
    last = {leaf.shape[-1] for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()}
    counts = {v for owner in owners_of_numbers(unit) for name, v in owner.items() if type(v) is int and _is_count(name)}
    within = {v for v in named_widths(unit) | last if any(width % v == 0 for width in widths)} - widths - set(kept)
    found: list[tuple[int, Division]] = []
    for factor in FACTORS:
        of_weights = {width for width in widths if width % (factor * size) == 0 and width // factor >= _LEAST_SIZE}
        of_weights = {width for width in of_weights if have_same_shards(width, width // factor, size)}
        others = {value for value in within if value % factor == 0 and value // factor >= _LEAST_SIZE}
        choices = of_weights - counts | others, of_weights | others, of_weights
        for sizes in dict.fromkeys(map(frozenset, choices)):
            division = Division(factor, sizes)
            found.append((sum(prod(division.shape(shape)) for shape in shapes), division))
    for is_enough in (True, False):
        some = [division for numel, division in found if (numel <= _MOST_NUMEL) is is_enough and division.sizes]
        yield from some if is_enough else reversed(some)


def named_widths(unit: nn.Module) -> set[int]:
    """The numbers in attributes that are named as widths, such as the features of a head."""
    return {value for owner in owners_of_numbers(unit) for name, value in owner.items() if _names_width(name, value)}


def have_same_shards(width: int, quotient: int, size: int) -> bool:
    """Whether each number of ranks that divides `size` can shard both, in as many pieces, or neither."""
    ranks = [number for number in range(1, size + 1) if size % number == 0]
    return all(
        (width % (k * number) == 0) is (quotient % (k * number) == 0)
        and (number % width == 0) is (number % quotient == 0)
        for number in ranks
        for k in _MULTIPLES
    )


def _is_count(name: str) -> bool:
    return "vocab" in name or (any(word in name for word in _COUNTS) and not any(word in name for word in _WIDTHS))


def _names_width(name: str, value: Any) -> bool:
    return type(value) is int and value > 1 and not _is_count(name) and any(word in name for word in _WIDTHS)


def owners_of_numbers(unit: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields the attributes of each module, and of the configurations that they refer to, each once."""
    seen: set[int] = set()
    for module in unit.modules():
        yield vars(module)
        for value in vars(module).values():
            if id(value) not in seen and _is_configuration(value):
                seen.add(id(value))
                yield vars(value)


def _is_configuration(value: Any) -> bool:
    """Whether a value is an object of the user's with attributes; no module, tensor, function or type."""
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(("torch.", "builtins"))


_NONE = Division(1, frozenset())


def copy_of_unit(unit: nn.Module, division: Division = _NONE, *, with_values: bool = False) -> nn.Module:
    """A copy of a unit whose parameters are fake tensors in float64, on the CPU; so are buffers, or they have values.

    Raises:
        TypeError: A parameter is no plain one.
    """
    memo: dict[int, Any] = {}
    for name, parameter in unit.named_parameters():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, FakeTensor):
            raise TypeError(f"{name} is a {type(parameter).__name__}")
        memo[id(parameter)] = nn.Parameter(_fake(parameter, division), requires_grad=parameter.requires_grad)
    attributes = (value for module in unit.modules() for value in vars(module).values() if isinstance(value, Tensor))
    for tensor in (*unit.buffers(), *attributes):
        if id(tensor) not in memo:
            memo[id(tensor)] = divided(tensor, division) if with_values else _fake(tensor, division)
    shared = {id(owner) for owner in owners_of_numbers(unit)}
    twin: nn.Module = copy.deepcopy(unit, memo)
    for owner in owners_of_numbers(twin):
        if id(owner) in shared and division.sizes:
            raise TypeError("an object with numbers cannot be copied")
        owner.update({name: division.attribute(name, value) for name, value in owner.items()})
    return twin


def divided_leaf(leaf: Any, division: Division, *, with_values: bool) -> Any:
    """An argument of the unit with divided tensors; with `with_values` they keep their values, if they have some."""
    if isinstance(leaf, Tensor):
        tensor = divided(leaf, division) if with_values else _fake(leaf, division)
        return tensor.requires_grad_(leaf.requires_grad)
    return copied(leaf, lambda tensor: divided_leaf(tensor, division, with_values=with_values).detach())


def divided(tensor: Tensor, division: Division) -> Tensor:
    """A tensor of any shape with divided sizes, on the CPU; without values if it has none."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return _fake(tensor, division)
    value = tensor.detach().to("cpu")
    for dim, length in enumerate(value.shape if value.is_floating_point() else ()):
        if division.of(length) != length:
            value = value.index_select(dim, torch.arange(0, length, division.factor))
    return value.clone() if value.data_ptr() == tensor.data_ptr() else value


def _fake(tensor: Tensor, division: Division) -> Tensor:
    # Numbers that are no widths (indices, masks) keep their sizes.
    shape = division.shape(tensor.shape) if tensor.is_floating_point() else tuple(tensor.shape)
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    with FAKE_MODE:
        return torch.empty(shape, dtype=dtype)
