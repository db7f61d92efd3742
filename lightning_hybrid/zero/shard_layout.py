"""Layout of sharded parameters: which shard a rank has, and the offsets of shards in one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.zero.memory_mapped_states import aligned

_P = ParamSpec("_P")
# torch 2.13 gave the collectives on single tensors new names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GradientObserver(Protocol):
    """Observer of gradients before and after they are reduced over replicas."""

    def before_reduce(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Called with the full gradient of this rank's batch."""

    def after_reduce(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Called with the shard of the average, with what earlier batches have accumulated."""


@dataclass(frozen=True)
class ShardRanks:
    """The ranks over which parameters are sharded.

    Attributes:
        shard: The ranks that together hold one copy.
        replicate: The ranks that hold the same shard of other copies.
        num_replicas: Replicas whose gradients are averaged: more than these ranks, if gradients on a rank already come
            from the data of several replicas.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup
    num_replicas: int


def below_read_guards(method: Callable[_P, None]) -> Callable[_P, None]:
    """Run a method below the read guards: operations on a parameter see its local shard, and gather nothing."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            method(*args, **kwargs)

    return run


def launch_reduce_scatter(message: Tensor, group: dist.ProcessGroup) -> tuple[dist.Work | None, Tensor]:
    """Start a reduce-scatter of a message; what it receives may be several rows, yet to be summed.

    Args:
        message: One row for each rank.
        group: The ranks.
    """
    if group.size() == 1:
        return None, message
    if dist.get_backend(group) == "gloo":  # whose reduce-scatter is an all-reduce of everything
        received = torch.empty_like(message)
        return dist.all_to_all_single(received, message, group=group, async_op=True), received
    received = message.new_empty(1, message.shape[1])
    return _reduce_scatter(received, message, group=group, async_op=True), received


def bytes_of_shards(parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Shard]) -> int:
    """Bytes that the shards of a group take in a file; the parameters hold shards."""
    return sum(aligned(p.nbytes) for name, p in parameters.items() if name in placements)


def offsets_of(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offset of each tensor in a message, by name, and the end of the last one; sizes in elements."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += size
    return offsets, end


def numel_of(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def memoryless_like(parameter: Tensor) -> Tensor:
    """A stand-in of the parameter's shape without memory of its own; its elements are NaN (0 for integers)."""
    content: Any = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return parameter.data.new_full((), content).expand(parameter.shape)


def shard_placement(shape: torch.Size, size: int) -> Shard | None:
    """Placement of a parameter's shards: along the first dim, or the longest if that is too short for all ranks.

    Args:
        shape: Of the tensor to shard.
        size: Number of ranks.

    Returns:
        None for a single number, which every rank holds.
    """
    if shape.numel() <= 1:
        return None
    dim = 0 if shape[0] >= size else max(range(len(shape)), key=lambda d: shape[d])
    return Shard.allowing_empty(dim, shape[dim], size)


def check_unchanged(changed: Sequence[str], fqn: str) -> None:
    """Check that parameters that are full for an evaluation have not been written.

    Args:
        changed: FQNs of those that have been written.
        fqn: Of their layer.

    Raises:
        RuntimeError: Some have been.
    """
    if changed:
        raise RuntimeError(
            f"{changed[0]} and {len(changed) - 1} other parameters of {fqn or 'the module'} were changed"
            " between the batches of an evaluation, for which they had been gathered; change them before it begins"
            " (on_validation_epoch_start is early enough), or set zero_stage=0"
        )


def check_not_late(name: str, gradient: Tensor | None) -> None:
    """Check that a parameter gets no gradient while its average is under way.

    Args:
        name: FQN of the parameter.
        gradient: The gradient that it has got since.

    Raises:
        RuntimeError: It has got one.
    """
    if gradient is not None:
        raise RuntimeError(
            f"{name} got another gradient after its average was under way; set use_reentrant=False where a"
            " checkpointed function shares this parameter"
        )
