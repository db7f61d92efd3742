"""Connect the gradients of a module: what is averaged over replicas, what is summed over stages, what is counted."""

from __future__ import annotations

from torch import nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.pipeline.shared import SharedParameters
from lightning_hybrid.replicate.reducer import GradientReducer

Reducers = dict[int | None, GradientReducer]


def connect_gradients(
    module: nn.Module, plan: StagePlan | None, mesh: Mesh
) -> tuple[Reducers, SharedParameters | None, set[int]]:
    """Build the reducers of one rank.

    Args:
        module: The user's module.
        plan: Which stage holds what; None without stages.
        mesh: The ranks.

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
            stages = [s for s in plan.stages_of(name) if s in plan.stages]
            # What several stages or ranks hold is complete only after all of them.
            key = stages[0] if len(ranks) == 1 and len(stages) == 1 else None
            own.setdefault(key, []).append((name, parameters[name]))
    reducers: Reducers = {key: GradientReducer(members, data) for key, members in own.items()}
    return reducers, SharedParameters(holders, parameters, mesh.group("pp")), counted
