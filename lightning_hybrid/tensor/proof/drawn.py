"""Inputs and buffers in general position: values of the same shapes that tell a wrong plan from a right one.

A recorded batch may be too special to prove anything. Where all positions are equal, attention gives the mean of its
values whatever its heads are; what a gate of zero multiplies is never seen. So values are drawn wherever the unit runs
on drawn ones by the same lines, and its results stay finite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.params import store
from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.tensor.proof.example import PLAIN, Example

_TRIES = 3  # a drawn mask may hide everything from a position
_HUGE = 1e4  # added to a score to hide its position


def in_general_position(
    unit: nn.Module,
    example: Example,
    lines: Callable[[Example], Collection[int] | None],
    generator: torch.Generator,
) -> Example | str:
    """Draws the inputs of an example and the buffers of its unit; values that have to stay as they are stay.

    ``lines`` runs the unit on an example; it returns the lines that called torch, None without finite results.

    Returns:
        The example, or why it cannot prove anything: numbers that are all equal, and that the unit needs to be so.
    """
    recorded = lines(example)
    slots: list[_Slot] = [_Argument(index) for index, leaf in enumerate(example.leaves) if not _is_plain(leaf)]
    slots += map(_OfUnit, _tensors_of(unit))
    changed = example
    for slot in slots:
        changed = slot.put(changed, next(slot.values(example, generator), slot.value(example)))
    if (found := lines(changed)) is not None and recorded in (None, found):
        example, slots = changed, []
    for slot in slots:
        slot.put(example, slot.value(example))
    for slot in [*slots, *_gates_of(unit, example)]:  # one may have a meaning that drawn values miss
        for value in slot.values(example, generator):
            changed = slot.put(example, value)
            if (found := lines(changed)) is not None and recorded in (None, found):
                example = changed
                break
        else:
            slot.put(example, slot.value(example))
            if isinstance(slot, _Argument) and _tells_nothing(slot.value(example)):
                return "an argument has equal numbers in the recorded batch, and the unit runs on no others"
    return example


class _Argument:
    """An argument of the example: a tensor, an object with tensors, or a number."""

    def __init__(self, index: int) -> None:
        self._index = index

    def value(self, example: Example) -> Any:
        return example.leaves[self._index]

    def put(self, example: Example, value: Any) -> Example:
        leaves = list(example.leaves)
        leaves[self._index] = value
        return replace(example, leaves=tuple(leaves))

    def values(self, example: Example, generator: torch.Generator) -> Iterator[Any]:
        """Other values, the most general ones first."""
        value = self.value(example)
        if not isinstance(value, Tensor):
            yield 0.5 if type(value) is float else copied(value, lambda x: next(_drawn(x, generator), x))
            return
        for drawn in _drawn(value.detach(), generator, is_mask=not value.requires_grad and _may_be_mask(value)):
            yield drawn.requires_grad_(value.requires_grad)


class _OfUnit:
    """A buffer of the unit, or a tensor in an attribute."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._recorded = tensor, tensor.detach().clone()

    def value(self, example: Example) -> Tensor:
        return self._recorded

    def put(self, example: Example, value: Any) -> Example:
        store.move(self._tensor, value.clone())
        return example

    def values(self, example: Example, generator: torch.Generator) -> Iterator[Tensor]:
        """Other values near the recorded ones, which may be a table or a range."""
        recorded = self._recorded
        is_of_numbers = recorded.is_floating_point() or recorded.is_complex()
        if is_of_numbers and (_is_constant(recorded) or not _may_be_mask(recorded)):
            ones = recorded if recorded.any() else torch.ones_like(recorded)
            yield ones * _uniform(ones, generator)


class _Gate:
    """A plain number in an attribute of the user's module that is 0, and may multiply what is proved."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name

    def value(self, example: Example) -> float:
        return 0.0

    def put(self, example: Example, value: Any) -> Example:
        self._module.__dict__[self._name] = value
        return example

    def values(self, example: Example, generator: torch.Generator) -> Iterator[float]:
        yield 0.5


_Slot = _Argument | _OfUnit | _Gate


def _gates_of(unit: nn.Module, example: Example) -> list[_Slot]:
    """The numbers of the user's code that are 0."""
    found: list[_Slot] = [_Argument(index) for index, leaf in enumerate(example.leaves) if _is_zero(leaf)]
    for module in unit.modules():
        if not type(module).__module__.startswith("torch."):
            found += [_Gate(module, name) for name, value in vars(module).items() if _is_zero(value)]
    return found


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, PLAIN)


def _tensors_of(unit: nn.Module) -> Iterator[Tensor]:
    yield from unit.buffers()
    for module in unit.modules():
        for value in vars(module).values():
            if type(value) is Tensor and value.grad_fn is None and not value.is_meta:
                yield value


def _tells_nothing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1 and _is_constant(value)


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[:1]).all())


def _repeats_itself(mask: Tensor) -> bool:
    """Whether a mask is the same for all positions, or each position sees one other."""
    dims = range(min(1, mask.dim() - 1), mask.dim())
    if mask.numel() == 1 or any(mask.shape[dim] > 1 and bool((mask == mask.narrow(dim, 0, 1)).all()) for dim in dims):
        return True
    is_low = mask == mask.min() if mask.is_floating_point() else ~mask
    return any(bool((each.sum(-1) == 1).all()) for each in (is_low, ~is_low))


def _may_be_mask(tensor: Tensor) -> bool:
    """Whether the values are two, or some hide what they are added to."""
    if tensor.dtype is torch.bool:
        return True
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    low, high = tensor.min(), tensor.max()
    is_of_two = bool(((tensor == low) | (tensor == high)).all()) and (low != high or low in (0, 1))
    return bool(is_of_two or not tensor.isfinite().all() or tensor.abs().max() >= _HUGE)


def _drawn(tensor: Tensor, generator: torch.Generator, *, is_mask: bool = False) -> Iterator[Tensor]:
    """Yields other values of a kind."""
    if not tensor.numel():
        return
    if is_mask:
        if _repeats_itself(tensor):  # others, such as causal ones, may be what another argument says
            yield from (_mixed(tensor, generator) for _ in range(_TRIES))
    elif tensor.is_floating_point() or tensor.is_complex():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        center, spread = float(real.double().mean()), float(real.double().std(correction=0))
        drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        yield center + drawn * (spread or abs(center) or 1.0)
        yield (torch.ones_like(tensor) if _is_constant(tensor) else tensor.abs()) * _uniform(tensor, generator)
    if _is_equal_in_each_row(tensor):
        yield from _varied(tensor)


def _uniform(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(tensor.shape, dtype=torch.float64, generator=generator).to(tensor.real.dtype) + 0.5


def _mixed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the values replaced by others that occur; where none do, zeros and ones mixed."""
    values = tensor.flatten()
    if _is_constant(tensor):
        values = torch.stack([values[0], (values[0] == 0).to(values.dtype)])
    others = values[torch.randint(len(values), tensor.shape, generator=generator)]
    mixed = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, tensor, others)
    if torch.equal(mixed, tensor) and _is_constant(tensor):
        mixed.view(-1)[-1] = values[1]
    return mixed


def _is_equal_in_each_row(tensor: Tensor) -> bool:
    if tensor.numel() < 2:
        return False
    rows = tensor.reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
    return rows.shape[1] > 1 and bool((rows == rows[:, :1]).all())


def _varied(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor with other values at the last position, and in the other positions of the last row if they can be.

    The first batch may have one document or no padding in each sample, and later ones several.
    """
    is_last = torch.zeros(tensor.shape, dtype=torch.bool)
    is_last[..., -1] = True
    if tensor.dtype is torch.bool:
        yield tensor ^ is_last
    elif tensor.is_floating_point():
        yield tensor - is_last.to(tensor.dtype)
    else:
        in_row = is_last.clone()
        in_row[-1] = ~in_row[-1] if tensor.dim() > 1 else in_row[-1]
        for changed in (in_row, is_last):
            yield tensor + changed.to(tensor.dtype)
            yield tensor - changed.to(tensor.dtype)
