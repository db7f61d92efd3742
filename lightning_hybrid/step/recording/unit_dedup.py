"""Deduplication of units: the first of many like layers is recorded, and reused for the others.

Two units are alike if they have the same classes, plain attributes and tensor shapes throughout, get arguments of the
same shapes, and share every other object they refer to. A whole number that equals a unit's own position in its list
(a layer index) counts as the same, and so does a text that is the name of something in it or around it. What is reused
is metadata alone (result shapes, costs); a replay that finds another shape says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.graph.step_graph import SizedBy
from lightning_hybrid.step.module_state.snapshot import reachable
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.absent_tensors import make_absent
from lightning_hybrid.step.standins.cost_counter import CostWatch
from lightning_hybrid.step.tracing.func_transforms import refuse_transforms

_PLAIN = (bool, int, float, str, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TENSORS = ("_parameters", "_buffers")
_SKIPPED = (*_TENSORS, "_modules", "forward", "training")


class UnitKinds:
    """Gives units that do the same one number."""

    def __init__(self) -> None:
        """No unit has been seen."""
        self._kinds: dict[Hashable, list[tuple[list[int], int | None, int]]] = {}
        self._count = 0

    def kind_of(self, fqn: str, unit: nn.Module) -> int:
        """The number of the kind that a unit is of.

        Args:
            fqn: FQN of the unit, which tells its position among its like.
            unit: The unit.
        """
        digits = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", fqn)
        position = int(digits[-1]) if digits else None
        numbers: list[int] = []
        key = tuple(_module_key(name, module, numbers, fqn) for name, module in unit.named_modules())
        seen = self._kinds.setdefault(key, [])
        for others, other_position, kind in seen:
            # A head count of 2 in the layer at position 2 is no layer index: both readings are tried.
            if all(
                number == other or (number == position and other == other_position)
                for number, other in zip(numbers, others, strict=True)
            ):
                return kind
        self._count += 1
        seen.append((numbers, position, self._count))
        return self._count


def _module_key(name: str, module: nn.Module, numbers: list[int], fqn: str) -> Hashable:
    """What a module is but for whole numbers, which are appended to ``numbers``, and for names by its unit's FQN."""
    tensors = [
        (member, None if tensor is None else _tensor_key(tensor))
        for group in _TENSORS
        for member, tensor in module.__dict__[group].items()
    ]
    attributes = [
        (key, _value_key(value, numbers, fqn))
        for key, value in module.__dict__.items()
        if key not in _SKIPPED and not (isinstance(value, dict) and not value)
    ]
    return name, type(module), module.training, tuple(tensors), tuple(attributes)


def _value_key(value: Any, numbers: list[int], fqn: str) -> Hashable:
    if type(value) is int:
        numbers.append(value)
        return int
    if type(value) is str and fqn and f"{value}.".startswith(f"{fqn}."):  # the name of something in the unit
        return "in the unit", value[len(fqn) :]
    if type(value) is str and value and fqn.startswith(f"{value}."):  # of what the unit lies in
        return "around the unit", fqn[len(value) :].count(".")
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(_value_key(item, numbers, fqn) for item in value)
    if isinstance(value, Tensor):
        return _tensor_key(value)
    if type(value) is set and all(isinstance(item, _PLAIN) for item in value):
        return frozenset(value)
    return id(value)


def _tensor_key(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


@contextlib.contextmanager
def each_alone(units: Mapping[str, nn.Module]) -> Iterator[None]:
    """No unit is like another inside, so that a recording runs each of them."""
    for unit in units.values():
        unit.__dict__[_ALONE] = object()
    try:
        yield
    finally:
        for unit in units.values():
            unit.__dict__.pop(_ALONE, None)


_ALONE = "_hybrid_recorded_alone"


def arguments_key(leaves: list[Any], spec: Any) -> Hashable:
    """Equal for arguments that make a unit do the same."""
    first_place: dict[int, int] = {}
    keys: list[Hashable] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor):
            again = first_place.setdefault(id(leaf), place)
            kind = leaf.dtype, leaf.device, leaf.requires_grad
            keys.append((again, tuple(leaf.shape), tuple(leaf.stride()), *kind))
        elif isinstance(leaf, _PLAIN):
            keys.append((type(leaf), leaf))
        else:
            keys.append(id(leaf))
    autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
    return tuple(keys), _spec_key(spec), torch.is_grad_enabled(), *autocast


def _spec_key(spec: Any) -> Hashable:
    return None if spec is None else tuple(_spec_key(child) for child in spec.children)


class _Known(NamedTuple):
    """What a recorded unit showed: each result leaf as (place among the inputs, stand-in, plain value)."""

    leaves: tuple[tuple[int | None, FakeTensor | None, Any], ...]
    spec: Any
    flops: float
    moved_bytes: float
    drawing: tuple[str, ...]
    sized_by: SizedBy


class LikeUnits:
    """Runs units on stand-ins, each kind once.

    Attributes:
        reused: Whether autograd's graph has gaps, where results were taken from a like unit.
    """

    def __init__(self, costs: CostWatch) -> None:
        """Args: costs: where what a reused unit costs is counted too."""
        self._costs = costs
        self._kinds = UnitKinds()
        self._known: dict[Hashable, _Known] = {}
        self.reused = False

    def run(
        self, fqn: str, unit: nn.Module, leaves: list[Any], spec: Any, execute: Callable[[], tuple[Any, SizedBy]]
    ) -> tuple[Any, SizedBy]:
        """The result of a unit on stand-ins, and what its size depends on but shapes.

        Args:
            fqn: FQN of the unit.
            unit: The unit.
            leaves: Leaves of its arguments.
            spec: Their containers.
            execute: Runs it.
        """
        refuse_transforms(fqn)
        key = self._kinds.kind_of(fqn, unit), arguments_key(leaves, spec)
        known = self._known.get(key)
        if known is None:
            return self._learn(key, fqn, unit, leaves, execute)
        self.reused = True
        self._costs.flops += known.flops
        self._costs.moved_bytes += known.moved_bytes
        self._costs.drawing.update((fqn + relative, None) for relative in known.drawing)
        made: dict[int, Tensor] = {}  # a tensor may be there twice
        for _, like, _ in known.leaves:
            if like is not None and id(like) not in made:
                made[id(like)] = _another(like)
        given = [
            leaves[place] if place is not None else plain if like is None else made[id(like)]
            for place, like, plain in known.leaves
        ]
        return unflatten(given, known.spec), known.sized_by

    def _learn(
        self, key: Hashable, fqn: str, unit: nn.Module, leaves: list[Any], execute: Callable[[], tuple[Any, SizedBy]]
    ) -> tuple[Any, SizedBy]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        flops, moved, drawn = self._costs.flops, self._costs.moved_bytes, set(self._costs.drawing)
        aside = self._costs.read_aside
        out, sized_by = execute()
        out_leaves, out_spec = flatten(out)
        described = [_describe(leaf, leaves) for leaf in out_leaves]
        repeatable = (
            [tensor._version for tensor in tensors] == versions
            and self._costs.read_aside == aside
            and not any(isinstance(left, FakeTensor) for _, left in reachable(unit, plain=False))
            and all(description is not None for description in described)
        )
        if repeatable:
            drawing = [n for n in self._costs.drawing if n not in drawn and (n == fqn or n.startswith(fqn + "."))]
            self._known[key] = _Known(
                tuple(description for description in described if description is not None),
                out_spec,
                self._costs.flops - flops,
                self._costs.moved_bytes - moved,
                tuple(name[len(fqn) :] for name in drawing),
                sized_by,
            )
        return out, sized_by


def _another(like: FakeTensor) -> Tensor:
    """A stand-in like this one; never a leaf of autograd, which could not be written in place."""
    absent = make_absent(like)
    return absent.clone() if like.requires_grad else absent


def _describe(leaf: Any, inputs: list[Any]) -> tuple[int | None, FakeTensor | None, Any] | None:
    """How a result leaf of another unit of this kind is made; None if that is not known."""
    for place, given in enumerate(inputs):
        if leaf is given and not isinstance(leaf, _PLAIN):
            return place, None, None
    if isinstance(leaf, FakeTensor):
        return None, leaf, None
    return (None, None, leaf) if isinstance(leaf, _PLAIN) else None
