"""Connect the gradients of a module: what is averaged over replicas, what is summed over stages, what is counted."""

from __future__ import annotations

from torch import nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.pipeline.shared import SharedParameters
from lightning_hybrid.replicate.reducer import GradientReducer

Reducers = dict[int | None, GradientReducer]


def stage_of_gradient(plan: StagePlan, name: str) -> int | None:
    """After which stage's last backward the gradient of a parameter of this rank is complete; None: after all."""
    stages = [stage for stage in plan.stages_of(name) if stage in plan.stages]
    return stages[0] if len(plan.ranks_of(name)) == 1 and len(stages) == 1 else None


def connect_gradients(
    module: nn.Module, plan: StagePlan | None, mesh: Mesh, *, averages: bool = True
) -> tuple[Reducers, SharedParameters | None, set[int]]:
    """Build the reducers of one rank.

    Args:
        module: The user's module.
        plan: Which stage holds what; None without stages.
        mesh: The ranks.
        averages: Whether to build reducers; else somebody else averages over replicas.

    Returns:
        A bucketed reducer by stage (None: what is complete only after all stages), the parameters that several
        pipeline ranks hold, and the ids of the parameters that this rank counts in a norm.
    """
    parameters = dict(module.named_parameters())
    data = mesh.group("data")
    if plan is None or plan.first is None:
        everything = {id(parameter) for parameter in parameters.values()}
        return {None: GradientReducer(list(parameters.items()), data)}, None, everything
    holders = {name: plan.ranks_of(name) for name in parameters}
    counted = {id(parameters[name]) for name, ranks in holders.items() if ranks[0] == plan.rank}
    own: dict[int | None, list[tuple[str, nn.Parameter]]] = {None: []}
    for name, ranks in holders.items():
        if plan.rank in ranks:
            own.setdefault(stage_of_gradient(plan, name), []).append((name, parameters[name]))
    reducers: Reducers = {key: GradientReducer(members, data) for key, members in own.items()} if averages else {}
    return reducers, SharedParameters(holders, parameters, mesh.group("pp")), counted
