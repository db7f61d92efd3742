"""The check after a change of the layout: all ranks agree on who holds what, before any of them sends.

A message has the shape that its sender holds and its receiver expects. Both follow from one table: the full shape,
dtype and holders of each parameter, and the parameters of each message. Ranks that have the same table, and hold what
it says, cannot enter a collective with different shapes.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.errors import RanksDisagree
from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.run.connected import Optimization
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.standins.tensors import full_shape, is_absent

_Table = dict[str, list[Any]]


def check_layout(run: Run, optimization: Optimization) -> None:
    """Check that all ranks have the same layout, and hold what it says; collective over the world, one small message.

    Raises:
        RanksDisagree: They have not; raised on every rank.
    """
    table, ranks = _table(run, optimization), _ranks_that_share(run)
    row = {part: zlib.crc32(repr(entries).encode()) for part, entries in table.items()}, _not_as_planned(run)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    wrong = next(((rank, text) for rank, (_, text) in enumerate(rows) if text), None)
    differs = any(rows[rank][0][part] != row[0][part] for part, others in ranks.items() for rank in others)
    votes: list[Any] = [None] * len(rows)
    if not wrong:
        dist.all_gather_object(votes, table if differs else None)
        wrong = next(((rank, "") for rank, vote in enumerate(votes) if vote), None)
    if not wrong:
        return
    rank, text = wrong
    raise RanksDisagree(
        f"after a change of the layout rank {rank} holds or sends something else than the other ranks expect:"
        f" {text or _first_difference(votes, rank)}. Ranks have run different code before (a condition on the rank, or"
        " random numbers with different seeds); let all ranks take the same branches",
        entry="layout-differs",
    )


def _table(run: Run, optimization: Optimization) -> _Table:
    """The parameters, and the parameters in each message, as this rank knows them."""
    plan = run.partitioned
    parameters = [
        (
            name,
            tuple(full_shape(parameter)),
            str(parameter.dtype),
            () if plan is None else plan.ranks_of(name),
        )
        for name, parameter in run.setting.module.named_parameters()
    ]
    groups = run.active.groups
    return {
        "parameters": parameters,
        "gathers": [(group.fqn, *group.parameters) for group in groups],
        "averages": [(stage, *each.names) for stage, members in optimization.reducers.items() for each in members],
    }


def _ranks_that_share(run: Run) -> dict[str, list[int]]:
    """The ranks of the world that must know the same of each part of the table."""
    axes = {"gathers": "dp_shard", "averages": "data"}
    of_axes = {part: dist.get_process_group_ranks(run.mesh.group(axis)) for part, axis in axes.items()}
    return {"parameters": list(range(dist.get_world_size())), **of_axes}


def _not_as_planned(run: Run) -> str:
    """The first parameter that this rank does not hold as the table says; empty if there is none."""
    plan, parts = run.partitioned, run.parts
    with torch._C.DisableTorchFunctionSubclass():
        for name, parameter in run.setting.module.named_parameters():
            is_here = plan is None or plan.rank in plan.ranks_of(name)
            if is_absent(parameter) == is_here:
                return f"{name} is {'absent' if is_here else 'present'} there"
            if is_here:
                planned = shard_of(parts.shardings, name, full_shape(parameter)).shape
                if tuple(parameter.shape) != tuple(planned):
                    return f"{name} has shape {tuple(parameter.shape)} there, and {tuple(planned)} is its shard"
    return ""


def _first_difference(tables: list[_Table | None], rank: int) -> str:
    own, other = tables[rank], next(each for at, each in enumerate(tables) if each is not None and at != rank)
    assert own is not None and other is not None
    for part, entries in own.items():
        for position, entry in enumerate(entries):
            others = other[part][position : position + 1]
            if entry not in others:
                return f"{part} number {position} are {entry} there and {others} elsewhere"
    return "more of them elsewhere"
