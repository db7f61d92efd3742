"""The shapes that an optimizer's states have for a parameter, by which states of other parameters are refused.

torch loads any state for any parameter; a wrong one of a shape that broadcasts, or that a rank takes for its own shard,
would be stepped with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.optimizers.trial import can_step_shards, is_of_torch, state_shapes
from lightning_hybrid.step.standins.absent_tensors import full_shape


def check_state_shapes(
    optimizer: Optimizer, entries: Mapping[Any, Any], names: Sequence[str], *, is_sharded: bool
) -> None:
    """Check that states have the shapes that an optimizer gives them; alike on all ranks, and without messages.

    Args:
        optimizer: Built; it steps parameters of any shapes, or shards of them.
        entries: The states to load, full tensors of any device, by the number of the parameter.
        names: FQNs of the optimizer's parameters, by number.
        is_sharded: Whether ranks hold shards of parameters: then an optimizer of the user's is tried too.

    Raises:
        CheckpointError: A state has another shape.
    """
    for number, (group, parameter) in enumerate(_parameters(optimizer)):
        entry, shape = entries.get(number), full_shape(parameter)
        found = _tensors(entry)
        if not found:
            continue
        expected = _expected(optimizer, group, parameter, found, is_sharded=is_sharded)
        for name, value in found.items():
            if expected.get(name, tuple(value.shape)) != tuple(value.shape):
                raise CheckpointError(
                    f"the checkpoint does not fit {type(optimizer).__name__}: the state {name!r} of {names[number]} has"
                    f" shape {tuple(value.shape)} in the checkpoint, not {expected[name]}, and the parameter has"
                    f" {shape}; load a checkpoint of this model and optimizer that was saved in full",
                    entry="other-optimizer",
                )


def _expected(
    optimizer: Optimizer, group: int, parameter: Tensor, found: Mapping[str, Tensor], *, is_sharded: bool
) -> dict[str, tuple[int, ...]]:
    shape = full_shape(parameter)
    if is_of_torch(optimizer):
        return state_shapes(optimizer, group, shape, parameter.dtype) or {}
    if not is_sharded or not can_step_shards(optimizer):
        return {}
    return {name: shape for name, value in found.items() if value.dim() == len(shape)}


def _parameters(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter


def _tensors(entry: Any) -> dict[str, Tensor]:
    """States of more than one number; those of classes of their own are quantized, in blocks."""
    if not isinstance(entry, dict):
        return {}
    return {name: value for name, value in entry.items() if type(value) is Tensor and value.dim()}
