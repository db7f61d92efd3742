"""The proof of a unit's plan with the arguments of one call of a run, for lines of code that the search did not reach.

A padded batch brings a mask that the first batch did not have. All tensor ranks have the same arguments and find the
same; none of them waits for another.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, full_shape
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.search.plan_cache import prove_again


def lines_of_branch(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: UnitPlan) -> frozenset[int]:
    """The lines that called torch in a proof of a plan with these arguments; none if it is not proved by them.

    Args:
        unit: The unit; its weights are not read, and may be shards.
        args: Arguments of one call.
        kwargs: Its keyword arguments.
        plan: The plan.
    """
    leaves, spec = flatten((args, kwargs))
    args, kwargs = unflatten([_without_shards(leaf) for leaf in leaves], spec)
    proved: list[UnitPlan | None] = []

    def prove() -> None:
        with contextlib.suppress(Exception):
            proved.append(prove_again(_of_full_shapes(unit), args, kwargs, plan))

    # A thread has none of the run's modes: autocast, inference, the hooks of saved tensors, function modes.
    thread = threading.Thread(target=prove, name="proof of a tensor plan", daemon=True)
    thread.start()
    thread.join()
    return frozenset() if not proved or proved[0] is None else proved[0].calls


def _without_shards(leaf: Any) -> Any:
    """A tensor of the shape of a sharded one, without values: to read these is collective."""
    if not isinstance(leaf, ShardedTensorBase):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def _of_full_shapes(unit: nn.Module) -> nn.Module:
    """A copy of a unit whose parameters have their full shapes and no values; it has the unit's other tensors."""
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        empty = torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for tensor in (value for module in unit.modules() for value in vars(module).values() if isinstance(value, Tensor)):
        memo.setdefault(id(tensor), tensor)
    memo |= {id(buffer): buffer for buffer in unit.buffers()}
    twin: nn.Module = copy.deepcopy(unit, memo)
    return twin
