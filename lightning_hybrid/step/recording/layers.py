"""Deduplication of units: the first of several structurally equal layers is recorded, and reused for the others.

Two units are structurally equal if their classes, plain attributes and tensor shapes are equal, their arguments have
equal shapes, and they share every other object they refer to. An integer that equals a unit's own position in its list
(a layer index) counts as equal, and so does a string that is the name of something inside or around the unit. Only
metadata is reused (result shapes, costs); a replay that finds another shape raises.
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
from lightning_hybrid.step.module_state.snapshots import reachable_leaves
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.counts import CostCounter, SavedTensors, Totals
from lightning_hybrid.step.standins.tensors import make_absent
from lightning_hybrid.step.tracing.refusals import refuse_transforms

_PLAIN = (bool, int, float, str, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TENSORS = ("_parameters", "_buffers")
_SKIPPED = (*_TENSORS, "_modules", "forward", "training")


class UnitKinds:
    """Gives structurally equal units the same number."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, list[tuple[list[int], int | None, int]]] = {}
        self._count = 0

    def kind_of(self, fqn: str, unit: nn.Module) -> int:
        """The number of the kind of a unit; its FQN contains its position in a list of layers."""
        digits = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", fqn)
        position = int(digits[-1]) if digits else None
        numbers: list[int] = []
        key = tuple(_module_key(name, module, numbers, fqn) for name, module in unit.named_modules())
        recorded = self._kinds.setdefault(key, [])
        for others, other_position, kind in recorded:
            # A head count of 2 in the layer at position 2 is no layer index: both readings are tried.
            if all(
                number == other or (number == position and other == other_position)
                for number, other in zip(numbers, others, strict=True)
            ):
                return kind
        self._count += 1
        recorded.append((numbers, position, self._count))
        return self._count


def _module_key(name: str, module: nn.Module, numbers: list[int], fqn: str) -> Hashable:
    """A hashable description of a module; its integers are appended to ``numbers``, names are relative to ``fqn``."""
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
    if type(value) is str and fqn and f"{value}.".startswith(f"{fqn}."):  # the name of something inside the unit
        return "in the unit", value[len(fqn) :]
    if type(value) is str and value and fqn.startswith(f"{value}."):  # the name of a module around the unit
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


_UNIQUE = "_hybrid_recorded_alone"


@contextlib.contextmanager
def without_deduplication(units: Mapping[str, nn.Module]) -> Iterator[None]:
    """Make no two units structurally equal inside, so that a recording runs each of them."""
    for unit in units.values():
        unit.__dict__[_UNIQUE] = object()
    try:
        yield
    finally:
        for unit in units.values():
            unit.__dict__.pop(_UNIQUE, None)


def argument_signature(leaves: list[Any], spec: Any) -> Hashable:
    """A hashable description of arguments; equal if a unit runs the same operations on them."""
    first_position: dict[int, int] = {}
    keys: list[Hashable] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor):
            first = first_position.setdefault(id(leaf), position)
            kind = leaf.dtype, leaf.device, leaf.requires_grad
            keys.append((first, tuple(leaf.shape), tuple(leaf.stride()), *kind))
        elif isinstance(leaf, _PLAIN):
            keys.append((type(leaf), leaf))
        else:
            keys.append(id(leaf))
    autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
    return tuple(keys), _spec_key(spec), torch.is_grad_enabled(), *autocast


def _spec_key(spec: Any) -> Hashable:
    return None if spec is None else tuple(_spec_key(child) for child in spec.children)


class _CachedResult(NamedTuple):
    """Metadata of a recorded unit; each result leaf is (position among the inputs, stand-in, plain value)."""

    leaves: tuple[tuple[int | None, FakeTensor | None, Any], ...]
    spec: Any
    counted: Totals
    saved: SavedTensors
    drawing: tuple[str, ...]
    sized_by: SizedBy


class UnitDeduplicator:
    """Runs units on stand-ins, one of each kind.

    Attributes:
        reused: Whether autograd's graph has gaps, because results of a structurally equal unit were reused.
    """

    def __init__(self, costs: CostCounter) -> None:
        self._costs = costs
        self._kinds = UnitKinds()
        self._cache: dict[Hashable, _CachedResult] = {}
        self.reused = False

    def run(
        self, fqn: str, unit: nn.Module, leaves: list[Any], spec: Any, execute: Callable[[], tuple[Any, SizedBy]]
    ) -> tuple[Any, SizedBy]:
        """Return the result of a unit on stand-ins, and what its size depends on besides shapes."""
        refuse_transforms(fqn)
        key = self._kinds.kind_of(fqn, unit), argument_signature(leaves, spec)
        cached = self._cache.get(key)
        if cached is None:
            return self._run_and_cache(key, fqn, unit, leaves, execute)
        self.reused = True
        self._costs.reset_to(self._costs.totals().plus(cached.counted))
        self._costs.saved = cached.saved
        self._costs.drawing.update((fqn + relative, None) for relative in cached.drawing)
        made: dict[int, Tensor] = {}  # a tensor may occur twice
        for _, stand_in, _ in cached.leaves:
            if stand_in is not None and id(stand_in) not in made:
                made[id(stand_in)] = _fresh_stand_in(stand_in)
        result = [
            leaves[position] if position is not None else plain if stand_in is None else made[id(stand_in)]
            for position, stand_in, plain in cached.leaves
        ]
        return unflatten(result, cached.spec), cached.sized_by

    def _run_and_cache(
        self, key: Hashable, fqn: str, unit: nn.Module, leaves: list[Any], execute: Callable[[], tuple[Any, SizedBy]]
    ) -> tuple[Any, SizedBy]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        before, drawn = self._costs.totals(), set(self._costs.drawing)
        captured = self._costs.captured_reads
        out, sized_by = execute()
        self._costs.count_saved(leaves, out)
        out_leaves, out_spec = flatten(out)
        described = [_describe(leaf, leaves) for leaf in out_leaves]
        repeatable = (
            [tensor._version for tensor in tensors] == versions
            and self._costs.captured_reads == captured
            and not any(isinstance(leaf, FakeTensor) for _, leaf in reachable_leaves(unit, plain=False))
            and all(description is not None for description in described)
        )
        if repeatable:
            drawing = [n for n in self._costs.drawing if n not in drawn and (n == fqn or n.startswith(fqn + "."))]
            self._cache[key] = _CachedResult(
                tuple(description for description in described if description is not None),
                out_spec,
                self._costs.totals().since(before),
                self._costs.saved,
                tuple(name[len(fqn) :] for name in drawing),
                sized_by,
            )
        return out, sized_by


def _fresh_stand_in(stand_in: FakeTensor) -> Tensor:
    """A new stand-in with the same metadata; never an autograd leaf, which could not be written in place."""
    absent = make_absent(stand_in)
    return absent.clone() if stand_in.requires_grad else absent


def _describe(leaf: Any, inputs: list[Any]) -> tuple[int | None, FakeTensor | None, Any] | None:
    """The cached description of a result leaf, for other units of this kind; None if it cannot be reused."""
    for position, given in enumerate(inputs):
        if leaf is given and not isinstance(leaf, _PLAIN):
            return position, None, None
    if isinstance(leaf, FakeTensor):
        return None, leaf, None
    return (None, None, leaf) if isinstance(leaf, _PLAIN) else None
