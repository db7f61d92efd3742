"""ZeRO in a strategy: which parameters are sharded together, by which policy, and which code reads full ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.memory.free_memory import free_bytes
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.gather_on_read import ReadGuards, can_guard
from lightning_hybrid.parts.shard_and_unshard_parameters import AxisSharding
from lightning_hybrid.parts.shard_boxes import shard_of
from lightning_hybrid.step.objects.repeated_layers import find_layers
from lightning_hybrid.step.recording.choose_units import choose_units
from lightning_hybrid.step.standins.absent_tensors import full_shape, is_absent
from lightning_hybrid.strategies.techniques.build_gradient_reducers import stage_of_gradient
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.ranks import ShardRanks, bytes_of_shards, shard_placement
from lightning_hybrid.zero.storage import StorageDevices

if TYPE_CHECKING:
    from lightning_hybrid.experts.parallel.run_modules_with_sharded_experts import ShardedExperts
    from lightning_hybrid.optimizers.state_file import Region
    from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
    from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
    from lightning_hybrid.zero.sharding import Stage, ZeroSharding

# Share of the memory free at the start of a run that full layers and their gradients may take.
_FREE_MEMORY_SHARE = 0.25


def check_zero_replicas(stage: int, mesh: Mesh) -> None:
    """Refuse a ZeRO stage over a single replica.

    Raises:
        LayoutError: There is one replica.
    """
    if stage and mesh.size("dp_shard") == 1:
        raise LayoutError(
            f"zero_stage={stage} shards the state of a model over replicas, and this layout has shards of 1 replica"
            f" (data_parallel_size={mesh.layout.data_parallel_size}); set zero_stage=0, or more devices, or fewer"
            " pipeline stages or tensor ranks",
            entry="zero-replicas",
        )


def zero_shardings(module: nn.Module, mesh: Mesh, shardings: Sequence[AxisSharding]) -> list[AxisSharding]:
    """Return the sharding of each parameter over the ranks of a shard, or those of them that have the same experts.

    ``shardings`` are those that come before, from the full tensor on; the module is not sharded yet.
    """
    experts = {name for sharding in shardings if sharding.axis == "ep" for name in sharding.placements}
    shapes = {name: shard_of(shardings, name, parameter.shape).shape for name, parameter in module.named_parameters()}
    over_replicas = []
    for axis, names in (("dp_shard", shapes.keys() - experts), ("ep_shard", experts)):
        if not names or mesh.size(axis) == 1:
            continue
        group = mesh.group(axis)
        placements = {name: shard_placement(torch.Size(shapes[name]), group.size()) for name in shapes if name in names}
        sharded = {name: placement for name, placement in placements.items() if placement is not None}
        over_replicas.append(AxisSharding(group, sharded, axis=axis, places=mesh.places(axis)))
    return over_replicas


class LayerReads:
    """Records parameters of a layer that code outside of it reads: ``self.positions.weight[:n]``.

    Attributes:
        names: Their FQNs, once the step was recorded inside.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """Observe the layers while the step is recorded inside."""
        from lightning_hybrid.tensor.discovery.unit_calls_and_outside_reads import record_calls

        units = variant.recording.units
        with record_calls(find_layers(units), units) as calls:
            yield
        self.names = frozenset(f"{layer}.{name}" for layer, names in calls.read_outside.items() for name in names)


def shard_over_replicas(
    module: nn.Module,
    plan: StagePlan,
    reads: LayerReads,
    shardings: Sequence[AxisSharding],
    experts: ShardedExperts | None,
    mesh: Mesh,
    device: torch.device,
    *,
    stage: int,
    reshard_after_forward: bool | str,
    offload: Mapping[str, str],
    agree: Callable[[bool], bool],
    guards: ReadGuards | None,
    dtypes: Mapping[str, torch.dtype | None],
) -> ZeroSharding:
    """Group the local shards of parameters, which are sharded already, by layer and stage.

    ``reads``: reads of layers' parameters by other code; ``shardings``: of the parameters, over all axes;
    ``reshard_after_forward``: whether layers are gathered one by one, "auto" by the memory that is free; ``offload``:
    storage of offloaded state while no step needs it; ``agree``: returns whether the argument is true on any rank
    (collective); ``guards``: of a run whose steps were not recorded, None where a recording shows what they read;
    ``dtypes``: of messages, as fields of `ShardRanks`.
    """
    from lightning_hybrid.zero.sharding import ZeroSharding

    ranks = ShardRanks(mesh.group("dp_shard"), mesh.group("dp_replicate"), **dtypes)
    expert_ranks = ranks
    if experts is not None:
        expert_ranks = ShardRanks(mesh.group("ep_shard"), mesh.group("ep_outer"), **dtypes)
    placements = {name: placement for sharding in shardings for name, placement in sharding.placements.items()}
    members = members_of_groups(module, plan, reads.names, experts)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    sparse = {
        names[id(m.weight)] for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
    }
    groups: dict[Stage, list[ParameterGroup]] = {}
    devices = StorageDevices.of(offload, device)
    regions = _regions_for(offload.get("parameters"), [bytes_of_shards(each, placements) for each in members.values()])
    for (of, fqn, _, is_expert), parameters in members.items():
        group = ParameterGroup(
            fqn,
            parameters,
            placements,
            expert_ranks if is_expert else ranks,
            keeps_full=stage < 3,
            devices=devices,
            region=next(regions, None),
            sparse=sparse,
        )
        groups.setdefault(of, []).append(group)
    every = [parameter for group in members.values() for parameter in group.values()]
    per_layer = gathers_per_layer(reshard_after_forward, sum(map(_full_bytes, every)), device)
    per_layer = agree(per_layer) if reshard_after_forward == "auto" else per_layer
    zero = ZeroSharding(module, groups, ranks, device, per_layer=per_layer)
    if zero.per_layer and experts is None and ranks.shard.size() > 1:
        zero.gather_in_rounds(mesh)
    if guards is not None:
        zero.gather_on_read(guards)
    return zero


def gathers_per_layer(reshard_after_forward: bool | str, full_bytes: int, device: torch.device) -> bool:
    """Return whether layers are gathered one by one: as the option says, or by the memory that is free.

    ``full_bytes`` are those of all full parameters of this rank.
    """
    if reshard_after_forward == "auto":
        return 2 * full_bytes > _FREE_MEMORY_SHARE * free_bytes(device)
    return bool(reshard_after_forward)


def members_of_groups(
    module: nn.Module,
    plan: StagePlan,
    read_outside: Collection[str],
    experts: ShardedExperts | None,
    names: Collection[str] | None = None,
) -> dict[tuple[Stage, str, torch.dtype, bool], dict[str, nn.Parameter]]:
    """Return the local parameters by stage, layer, dtype and whether they are of experts, in the order of layers.

    ``names`` are the FQNs of local ones; None for those that are not absent.
    """
    units = choose_units(module, 1) if plan.num_ranks == 1 or plan.first is None else plan.first.recording.units
    layers = find_layers(units)
    layer_of = _layer_of_parameters(module, layers, plan, read_outside)
    of_experts: Collection[str] = ()
    if experts is not None:
        of_experts = experts.sharding.placements.keys()
        layer_of = {name: fqn for name, fqn in layer_of.items() if name not in experts.not_gathered_by_layer}
    members: dict[tuple[Stage, str, torch.dtype, bool], dict[str, nn.Parameter]] = {}
    order = {fqn: number for number, fqn in enumerate(["", *layers])}
    every = dict(module.named_parameters())
    local = {name: p for name, p in every.items() if (not is_absent(p) if names is None else name in names)}
    for name, parameter in sorted(local.items(), key=lambda item: order[layer_of.get(item[0], "")]):
        key = stage_of_gradient(plan, name), layer_of.get(name, ""), parameter.dtype, name in of_experts
        members.setdefault(key, {})[name] = parameter
    return members


def _regions_for(where: str | None, sizes: Sequence[int]) -> Iterator[Region]:
    """Yield a region of a file for each group of parameters, if they are offloaded to one."""
    if where is None or where == "cpu":
        return
    from lightning_hybrid.optimizers.state_file import StateFile

    file = StateFile(where.removeprefix("disk:"), sizes, content="the parameters")
    yield from file.regions()


def _layer_of_parameters(
    module: nn.Module, layers: Mapping[str, nn.Module], plan: StagePlan, by_others: Collection[str]
) -> dict[str, str]:
    """Return the layer that alone reads a parameter, by the parameter's FQN."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_step = {names[id(module.get_parameter(fqn))] for fqn in by_others}
    seen_when_read = plan.num_ranks == 1  # they are gathered then
    if not seen_when_read:
        assert plan.first is not None
        by_step |= plan.first.recording.parameters_read_outside().keys()
    by_step |= {n for n, parameter in module.named_parameters() if not (can_guard(parameter) or is_absent(parameter))}
    layer_of: dict[str, str] = {}
    several: set[str] = set()
    for fqn, layer in layers.items():
        if not seen_when_read and (layer._forward_pre_hooks or layer._forward_hooks):
            continue  # they run outside of its forward, and may read weights
        for parameter in layer.parameters():
            name = names[id(parameter)]
            if name in layer_of:
                several.add(name)
            layer_of[name] = fqn
    owned_outside = _owned_outside_layers(module, layers)
    return {n: fqn for n, fqn in layer_of.items() if n not in several | by_step | owned_outside}


def _owned_outside_layers(module: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """Return the parameters that some module outside of all layers holds too."""
    inside = {id(inner) for layer in layers.values() for inner in layer.modules()}
    outside = {id(p) for inner in module.modules() if id(inner) not in inside for p in inner._parameters.values()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in outside}


def _full_bytes(parameter: nn.Parameter) -> int:
    return math.prod(full_shape(parameter)) * parameter.element_size()


def describe_zero(stage: int, size: int, *, per_layer: bool, by_free_memory: bool = False) -> str:
    """Return the table line of ZeRO: what is sharded over how many replicas, and when it is gathered.

    ``by_free_memory`` tells that the free memory decided when.
    """
    what = ["optimizer states", "gradients", "parameters"][:stage]
    listed = what[0] if stage == 1 else f"{', '.join(what[:-1])} and {what[-1]}"
    when = "layer by layer, for each microbatch" if per_layer else "once per step"
    line = f"ZeRO-{stage}: {listed} sharded over {size} replicas, gathered and reduced {when}"
    if by_free_memory and stage == 3 and not per_layer:
        line += " (memory is ample; reshard_after_forward=True holds two layers at a time)"
    return line
