"""Where the shards of parameters lie that ranks share out, and how they lie in one message."""

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


class ShareObserver(Protocol):
    """Sees gradients that replicas share out."""

    def before_share(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """What this rank has of a batch, in full."""

    def after_share(self, parameter: nn.Parameter, part: Tensor) -> None:
        """This rank's part of the average, with what earlier batches gave."""


@dataclass(frozen=True)
class ShardRanks:
    """The ranks that share out parameters.

    Attributes:
        shard: Those among which the parts of one copy lie.
        replicate: Those that hold the same part of other copies.
        num_replicas: Replicas whose gradients are averaged: more than these ranks, if what a rank holds has gradients
            of the data of several.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup
    num_replicas: int


def on_shards(method: Callable[_P, None]) -> Callable[_P, None]:
    """Operations on a parameter mean what it holds, though code of the user's would find more of it gathered."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            method(*args, **kwargs)

    return run


def scattered(message: Tensor, group: dist.ProcessGroup) -> tuple[dist.Work | None, Tensor]:
    """Begin to sum messages over ranks, of which each keeps its row; what it receives may be rows yet to be summed.

    Args:
        message: A row for each rank.
        group: The ranks.
    """
    if group.size() == 1:
        return None, message
    if dist.get_backend(group) == "gloo":  # whose reduce-scatter is an all-reduce of everything
        received = torch.empty_like(message)
        return dist.all_to_all_single(received, message, group=group, async_op=True), received
    received = message.new_empty(1, message.shape[1])
    return _reduce_scatter(received, message, group=group, async_op=True), received


def bytes_of_parts(parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Shard]) -> int:
    """Room that the parts of a group take in a file, while its parameters hold them."""
    return sum(aligned(p.nbytes) for name, p in parameters.items() if name in placements)


def offsets_of(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each of these lies in a message, by name, and where the last one ends."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += size
    return offsets, end


def numel_of(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def nothing_of(parameter: Tensor) -> Tensor:
    """Something of the shape of a whole that holds no memory; whoever reads it gets no numbers."""
    content: Any = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return parameter.data.new_full((), content).expand(parameter.shape)


def shard_placement(shape: torch.Size, size: int) -> Shard | None:
    """Where the parts of a parameter lie: along its first dim, or its longest if that is too short for all ranks.

    Args:
        shape: What there is to share out.
        size: Number of ranks.

    Returns:
        None for a single number, which every rank keeps.
    """
    if shape.numel() <= 1:
        return None
    dim = 0 if shape[0] >= size else max(range(len(shape)), key=lambda d: shape[d])
    return Shard.shared_out(dim, shape[dim], size)


def refuse_changed(changed: Sequence[str], fqn: str) -> None:
    """See that parameters which are held in full for an evaluation have not been written.

    Args:
        changed: FQNs of those that have been.
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


def refuse_late(name: str, gradient: Tensor | None) -> None:
    """See that a parameter gets no gradient while its average is under way.

    Args:
        name: FQN of the parameter.
        gradient: What it has got since.

    Raises:
        RuntimeError: It has got one.
    """
    if gradient is not None:
        raise RuntimeError(
            f"{name} got another gradient after its average was under way; set use_reentrant=False where a"
            " checkpointed part shares this parameter"
        )
