"""Gradient reduction: averages over replicas, sums over stages, and norms that count each parameter once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.callbacks.adascale import AdaScale
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.namespaces.converted_objects import convert
from lightning_hybrid.namespaces.detect_lightning_namespace import namespace_of
from lightning_hybrid.parts.local_shards import LocalShards
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.tied_parameter_gradients import TiedParameters
from lightning_hybrid.replicate.gradient_reducer import GradientReducer
from lightning_hybrid.replicate.joint_gradient_reducer import JointReducer
from lightning_hybrid.zero.gather_and_free_parameters import ZeroSharding

Reducers = dict[int | None, GradientReducer | JointReducer]


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
    experts: Collection[str] = (),
) -> tuple[Reducers, TiedParameters | None, set[int]]:
    """Build the gradient reducers of one rank.

    Args:
        module: The user's module.
        plan: The stage plan; None without stages.
        mesh: The ranks.
        averages: Whether to build reducers; ZeRO averages over replicas otherwise.
        experts: FQNs of parameters of which other replicas hold other shards.

    Returns:
        A bucketed reducer by stage (None: of gradients that are complete only after all stages), the parameters that
            several pipeline ranks hold, and the ids of the parameters that this rank counts in a norm.
    """
    parameters = dict(module.named_parameters())
    data = mesh.group("data")
    if plan is None or not plan.is_partitioned:
        everything = {id(parameter) for parameter in parameters.values()}
        return {None: GradientReducer(list(parameters.items()), data)}, None, everything
    holders = {name: plan.ranks_of(name) for name in parameters}
    counted = {id(parameters[name]) for name, ranks in holders.items() if ranks[0] == plan.rank}
    own: dict[int | None, list[tuple[str, nn.Parameter]]] = {None: []}
    for name, ranks in holders.items():
        if plan.rank in ranks:
            own.setdefault(stage_of_gradient(plan, name), []).append((name, parameters[name]))
    reducers: Reducers = {}
    for key, members in own.items() if averages else ():
        dense = GradientReducer([(name, p) for name, p in members if name not in experts], data)
        reducers[key] = dense
        if experts:
            shared = [(name, p) for name, p in members if name in experts]
            of_experts = GradientReducer(shared, mesh.group("ep_replicate"), divisor=data.size())
            reducers[key] = JointReducer([dense, of_experts])
    return reducers, TiedParameters(holders, parameters, mesh.group("pp")), counted


def check_optimizers(optimizers: Sequence[Optimizer], plan: StagePlan | None) -> None:
    """Refuse optimizers that need parameters of several stages at once.

    Raises:
        ValueError: One needs all parameters in one vector.
    """
    has_stages = plan is not None and plan.num_ranks > 1
    if has_stages and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS needs all parameters in one vector, but each rank holds its own stages, and configure_optimizers"
            " does not name it; build it there, or set pipeline_parallel_size=1"
        )


def connect_adascale(
    trainer: Any,
    mesh: Mesh,
    counted: tuple[set[int], set[int]],
    reducers: Reducers,
    zero: ZeroSharding | None,
) -> None:
    """Let AdaScale observe gradients before and after their average.

    ``counted`` has the ids of the parameters whose gradients this rank counts before the average, and after it.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, AdaScale):
            callback.connect_mesh(mesh, lambda: counted, each_batch=zero is not None)
            for reducer in reducers.values():
                reducer.observer = callback
            if zero is not None:
                zero.observe(callback)


def has_adascale(trainer: Any) -> bool:
    """Whether a callback of the user is AdaScale."""
    for callback in trainer.callbacks:
        convert(callback, namespace_of(__name__))  # those of `configure_callbacks` have not passed the Trainer's door
    return any(isinstance(callback, AdaScale) for callback in trainer.callbacks)


def check_adascale(layout: ParallelLayout, parts: LocalShards | None) -> None:
    """Refuse AdaScale where it cannot observe gradients before and after their average, each once.

    Raises:
        ValueError: It cannot.
    """
    if layout.expert_parallel_size > 1:
        raise ValueError(
            "AdaScale compares the gradients of replicas, and those of experts are summed over"
            f" expert_parallel_size={layout.expert_parallel_size} of them before any replica has them; set"
            " expert_parallel_size=1"
        )
    if parts is not None and parts.has_repeated_shards:
        raise ValueError(
            f"AdaScale cannot count gradients of which several of the {layout.tensor_parallel_size} tensor ranks hold"
            " the same part (key heads fewer than ranks); set a smaller tensor_parallel_size"
        )
