"""Gradient reduction: averages over replicas, sums over stages, and norms that count each parameter once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.runtime.gradients import TiedParameters
from lightning_hybrid.replicate.bucket import receive
from lightning_hybrid.replicate.reducer import GradientReducer

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.stages.plan import StagePlan


class Reducers(dict[int | None, list[GradientReducer]]):
    """Average gradients over replicas, by the stage after which these are complete; None: after all stages."""

    @property
    def every(self) -> list[GradientReducer]:
        """The reducers of all stages."""
        return [reducer for members in self.values() for reducer in members]

    def arm(self, stage: int | None) -> None:
        """Announce that the gradients of a stage that the next backward accumulates are final."""
        for reducer in self.get(stage, ()):
            reducer.arm()

    def launch(self, stage: int) -> None:
        """Send the gradients of a stage; the schedule goes on, unless averages are to be stepped at once."""
        for reducer in self.get(stage, ()):
            if reducer.steps_early:
                reducer.finish()
            elif reducer.is_armed:
                reducer.launch()

    def finish(self) -> None:
        """Wait until the averages of all stages are in `grad`; the host reads once which parameters have one."""
        armed = [reducer for reducer in self.every if reducer.is_armed]
        receive([bucket for reducer in armed for bucket in reducer.launch()])
        for reducer in dict.fromkeys((*armed, *self.get(None, ()))):
            reducer.finish()

    def abandon(self) -> None:
        """End a backward of a step that is undone on all ranks."""
        for reducer in self.every:
            reducer.abandon()


def stage_of_gradient(plan: StagePlan, name: str) -> int | None:
    """Return the stage after whose last backward a local parameter's gradient is complete; None: after all."""
    stages = [stage for stage in plan.stages_of(name) if stage in plan.stages]
    return stages[0] if len(plan.ranks_of(name)) == 1 and len(stages) == 1 else None


def connect_gradients(
    module: nn.Module,
    plan: StagePlan | None,
    mesh: Mesh,
    *,
    averages: bool = True,
    unreplicated: Collection[str] = (),
    reduce_dtype: torch.dtype | None = None,
    sharded: Collection[str] = (),
) -> tuple[Reducers, TiedParameters | None, set[int]]:
    """Build the gradient reducers of one rank.

    Args:
        module: The user's module.
        plan: The stage plan; None without stages.
        mesh: The ranks.
        averages: Whether to build reducers; ZeRO averages over replicas otherwise.
        unreplicated: FQNs of parameters of which other replicas hold other shards.
        reduce_dtype: Of averages over replicas; that of each parameter if None.
        sharded: FQNs of parameters of which other ranks of a replica hold other shards.

    Returns:
        The reducers, the parameters that
            several pipeline ranks hold, and the ids of the parameters that this rank counts in a norm.
    """
    parameters = dict(module.named_parameters())
    data = mesh.group("data")
    if plan is None or not plan.is_partitioned:
        everything = {id(parameter) for parameter in parameters.values()}
        copies = _keys_of_copies(dict.fromkeys(parameters, ()), sharded, mesh)
        reducer = GradientReducer(list(parameters.items()), data, copies=copies, dtype=reduce_dtype)
        return Reducers({None: [reducer]}), None, everything
    holders = {name: plan.ranks_of(name) for name in parameters}
    counted = {id(parameters[name]) for name, ranks in holders.items() if ranks[0] == plan.rank}
    by_stage: dict[int | None, list[tuple[str, nn.Parameter]]] = {None: []}
    for name, ranks in holders.items():
        if plan.rank in ranks:
            by_stage.setdefault(stage_of_gradient(plan, name), []).append((name, parameters[name]))
    copies = _keys_of_copies(holders, sharded, mesh)
    reducers = Reducers()
    for key, members in by_stage.items() if averages else ():
        members_of_all = [(name, p) for name, p in members if name not in unreplicated]
        reducers[key] = [GradientReducer(members_of_all, data, copies=copies, dtype=reduce_dtype)]
        if unreplicated:
            shared = [(name, p) for name, p in members if name in unreplicated]
            reducers[key].append(GradientReducer(shared, mesh.group("ep_replicate"), dtype=reduce_dtype))
    return reducers, TiedParameters(holders, parameters, mesh.group("pp")), counted


def _keys_of_copies(
    holders: Mapping[str, Sequence[int]], sharded: Collection[str], mesh: Mesh
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """For parameters that several ranks of a replica copy: the stages' ranks, and if tensor ranks do."""
    if mesh.size("data") < 3:  # the sum of two numbers has one order
        return {}
    keys = {name: (tuple(ranks), mesh.size("tp") > 1 and name not in sharded) for name, ranks in holders.items()}
    return {name: key for name, key in keys.items() if len(key[0]) > 1 or key[1]}
