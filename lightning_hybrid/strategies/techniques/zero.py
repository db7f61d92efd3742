"""ZeRO in a strategy: which parameters are sharded together, by which policy, and who reads full ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.experts.parallel.expert_parallel import ShardedExperts
from lightning_hybrid.layout import LayoutError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.gather_on_read import ReadGuards, can_guard
from lightning_hybrid.parts.local_shards import AxisSharding
from lightning_hybrid.parts.shard_boxes import shard_of
from lightning_hybrid.patching import around
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.trace_variant import TraceVariant
from lightning_hybrid.step.objects.repeated_layers import find_layers
from lightning_hybrid.step.recording.choose_units import choose_units
from lightning_hybrid.step.standins.absent_tensors import full_shape, is_absent
from lightning_hybrid.strategies.options.strategy_options import Options
from lightning_hybrid.strategies.techniques.gradient_reduction import stage_of_gradient
from lightning_hybrid.strategies.user_code.hook_reads import steps_on_parts
from lightning_hybrid.strategies.user_code.user_optimizers import looks_at_all
from lightning_hybrid.tensor.discovery.unit_calls import record_calls
from lightning_hybrid.verify.copy_memory import free_bytes
from lightning_hybrid.zero.memory_mapped_states import Region, StateFile
from lightning_hybrid.zero.optimizer_states.all_parameters_step import AllParametersStep
from lightning_hybrid.zero.optimizer_states.layerwise_step import LayerwiseStep, why_not_layerwise
from lightning_hybrid.zero.optimizer_states.offloaded_states import OffloadedStates
from lightning_hybrid.zero.optimizer_states.sharded_step import ShardedStep, numel_of_shard
from lightning_hybrid.zero.parameter_group import ParameterGroup
from lightning_hybrid.zero.shard_layout import ShardRanks, bytes_of_shards, shard_placement
from lightning_hybrid.zero.storage_devices import StorageDevices
from lightning_hybrid.zero.unshard_policy import Stage, ZeroSharding

# Wholes of all layers, and their gradients, may take this share of the memory that is free when a run begins.
_SHARE = 0.25


def check_shard(stage: int, mesh: Mesh) -> None:
    """Refuse a stage that shares nothing out.

    Raises:
        LayoutError: There is one replica.
    """
    if stage and mesh.size("dp_shard") == 1:
        raise LayoutError(
            f"zero_stage={stage} shares the state of a model out over replicas, and this layout has shards of 1 replica"
            f" (data_parallel_size={mesh.layout.data_parallel_size}); set zero_stage=0, or more devices, or fewer"
            " pipeline stages or tensor ranks"
        )


def zero_shardings(module: nn.Module, mesh: Mesh, shardings: Sequence[AxisSharding]) -> list[AxisSharding]:
    """Where the parts of each parameter lie: over the ranks of a shard, or those of them that have the same experts.

    Args:
        module: The user's, before it is cut.
        mesh: The ranks.
        shardings: What else is cut, from the whole to what these ranks share out.
    """
    experts = {name for cut in shardings if cut.axis == "ep" for name in cut.placements}
    shapes = {name: shard_of(shardings, name, parameter.shape).shape for name, parameter in module.named_parameters()}
    found = []
    for axis, names in (("dp_shard", shapes.keys() - experts), ("ep_shard", experts)):
        if not names or mesh.size(axis) == 1:
            continue
        group = mesh.group(axis)
        placements = {name: shard_placement(torch.Size(shapes[name]), group.size()) for name in shapes if name in names}
        cut = {name: placement for name, placement in placements.items() if placement is not None}
        found.append(AxisSharding(group, cut, axis=axis, places=mesh.places(axis)))
    return found


class LayerReads:
    """Which parameters of a layer other code of its network reads: ``self.positions.weight[:n]``.

    Attributes:
        names: Their FQNs, once the step was recorded inside.
    """

    def __init__(self) -> None:
        """Nothing has been recorded."""
        self.names: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """See the layers while the step is recorded inside."""
        units = variant.recording.units
        with record_calls(find_layers(units), units) as calls:
            yield
        self.names = frozenset(f"{layer}.{name}" for layer, names in calls.read_outside.items() for name in names)


def share_out(
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
) -> ZeroSharding:
    """Group the parameters of this rank, which hold its parts already.

    Args:
        module: The user's.
        plan: Who holds what.
        reads: What other code reads of layers.
        shardings: Where the parts lie.
        experts: That ranks share.
        mesh: The ranks.
        device: Of this rank.
        stage: Of ZeRO.
        reshard_after_forward: Whether layers are gathered one by one; "auto" by the memory that is free.
        offload: Where what is that is not on the device while no step needs it.
        agree: Whether any rank says so; collective.
        guards: Of a run whose steps were not recorded; None where a recording shows what they read.
    """
    ranks = ShardRanks(mesh.group("dp_shard"), mesh.group("dp_replicate"), mesh.size("data"))
    expert_ranks = ranks
    if experts is not None:
        expert_ranks = ShardRanks(mesh.group("ep_shard"), mesh.group("ep_outer"), mesh.size("data"))
    units = choose_units(module, 1) if plan.num_ranks == 1 or plan.first is None else plan.first.recording.units
    layers = find_layers(units)
    layer_of = _layers_of(module, layers, plan, reads.names)
    placements = {name: placement for cut in shardings for name, placement in cut.placements.items()}
    of_experts: Collection[str] = ()
    if experts is not None:
        of_experts = experts.cut.placements.keys()
        layer_of = {name: fqn for name, fqn in layer_of.items() if name not in experts.not_gathered_by_layer}
    members: dict[tuple[Stage, str, torch.dtype, bool], dict[str, nn.Parameter]] = {}
    order = {fqn: number for number, fqn in enumerate(["", *layers])}
    own = {name: p for name, p in module.named_parameters() if not is_absent(p)}
    for name, parameter in sorted(own.items(), key=lambda item: order[layer_of.get(item[0], "")]):
        key = stage_of_gradient(plan, name), layer_of.get(name, ""), parameter.dtype, name in of_experts
        members.setdefault(key, {})[name] = parameter
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
    if reshard_after_forward == "auto":
        wholes = 2 * sum(_whole_bytes(parameter) for parameter in own.values())
        reshard_after_forward = agree(wholes > _SHARE * free_bytes(device))
    zero = ZeroSharding(module, groups, ranks, device, per_layer=bool(reshard_after_forward))
    if zero.per_layer and experts is None and ranks.shard.size() > 1:
        zero.gather_in_rounds(mesh)
    if guards is not None:
        zero.gather_on_read(guards)
    return zero


def _regions_for(where: str | None, sizes: Sequence[int]) -> Iterator[Region]:
    """A region of a file for each group of parameters, if they are to be in one."""
    if where is None or where == "cpu":
        return
    file = StateFile(where.removeprefix("disk:"), sizes, content="the parameters")
    yield from (Region(file, number) for number in range(len(sizes)))


def _layers_of(
    module: nn.Module, layers: Mapping[str, nn.Module], plan: StagePlan, by_others: Collection[str]
) -> dict[str, str]:
    """The layer that alone reads a parameter, by the parameter's FQN."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_step = {names[id(module.get_parameter(fqn))] for fqn in by_others}
    seen_when_read = plan.num_ranks == 1  # they are gathered then
    if not seen_when_read:
        assert plan.first is not None
        by_step |= plan.first.recording.parameters_read_outside().keys()
    by_step |= {name for name, parameter in module.named_parameters() if not can_guard(parameter)}
    found: dict[str, str] = {}
    several: set[str] = set()
    for fqn, layer in layers.items():
        if not seen_when_read and (layer._forward_pre_hooks or layer._forward_hooks):
            continue  # they run outside of its forward, and may read weights
        for parameter in layer.parameters():
            name = names[id(parameter)]
            if name in found:
                several.add(name)
            found[name] = fqn
    held_outside = _held_outside(module, layers)
    return {n: fqn for n, fqn in found.items() if n not in several | by_step | held_outside}


def _held_outside(module: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """Parameters that some module outside of all layers holds too."""
    inside = {id(inner) for layer in layers.values() for inner in layer.modules()}
    outside = {id(p) for inner in module.modules() if id(inner) not in inside for p in inner._parameters.values()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in outside}


def _whole_bytes(parameter: nn.Parameter) -> int:
    return math.prod(full_shape(parameter)) * parameter.element_size()


def describe_zero(stage: int, size: int, *, per_layer: bool) -> str:
    """One line: what is shared out among how many, and when it is gathered."""
    what = ["optimizer states", "gradients", "parameters"][:stage]
    listed = what[0] if stage == 1 else f"{', '.join(what[:-1])} and {what[-1]}"
    when = "layer by layer, for each microbatch" if per_layer else "once per step"
    return f"ZeRO-{stage}: {listed} shared out among {size} replicas, gathered and reduced {when}"


def steps_by_hand(module: pl.LightningModule, options: Options) -> bool:
    """Whether replicas share out the steps of optimizers that the module calls itself.

    Args:
        module: The user's.
        options: What was asked for.
    """
    away = bool(options.offloaded.keys() - {"optimizer_states"}) or options.save_distributed_checkpoint
    return options.zero_stage in (1, 2) and not module.automatic_optimization and not away


def describe_by_hand(stage: int, size: int) -> str:
    """One line: what is shared out where the module steps by hand."""
    return f"ZeRO-{stage}, stepped by hand: optimizer states shared out among {size} replicas, gradients averaged whole"


def step_on_shards(
    optimizers: Sequence[Optimizer], module: nn.Module, shardings: Sequence[AxisSharding], until: contextlib.ExitStack
) -> list[Optimizer]:
    """Let optimizers that the module calls itself step this rank's shards of parameters, which are full meanwhile.

    Args:
        optimizers: Of the run.
        module: The user's.
        shardings: Of its parameters over replicas.
        until: Closed when the run ends.

    Returns:
        The optimizers that look at full parameters, or at several: they step those on every rank.
    """
    placements = {name: placement for cut in shardings for name, placement in cut.placements.items()}
    by_id = {id(p): placements[name] for name, p in module.named_parameters() if name in placements}
    full = []
    for optimizer in optimizers:
        if looks_at_all(optimizer) or not steps_on_parts(optimizer):
            full.append(optimizer)
        elif shardings:
            until.callback(ShardedStep(optimizer, shardings[0].group, by_id).close)
    return full


def share_steps(
    optimizers: Sequence[Optimizer], ranks: dist.ProcessGroup, until: contextlib.ExitStack
) -> list[ShardedStep]:
    """Share out the states of optimizers that the module calls itself.

    Args:
        optimizers: Of the run.
        ranks: That share them.
        until: Closed when the run ends.

    Raises:
        ValueError: One may look at whole parameters, or at several.
    """
    found = []
    for optimizer in optimizers:
        if looks_at_all(optimizer) or not steps_on_parts(optimizer):
            raise ValueError(
                f"zero_stage with manual optimization has each replica step its part of every parameter, but"
                f" {type(optimizer).__name__} may look at whole ones, or at several; set zero_stage=0, or use an"
                " optimizer of torch that looks at single numbers, such as AdamW"
            )
        found.append(ShardedStep(optimizer, ranks))
        until.callback(found[-1].close)
    return found


def layers_of_parameters(module: nn.Module, plan: StagePlan | None) -> list[list[nn.Parameter]]:
    """All parameters, layer by layer; first those that are of none.

    Args:
        module: The user's.
        plan: Who holds what; None where every rank holds all.
    """
    units = dict(module.named_children()) if plan is None else choose_units(module, 1)
    if plan is not None and plan.num_ranks > 1 and plan.first is not None:
        units = dict(plan.first.recording.units)
    members = [list(layer.parameters()) for layer in find_layers(units).values()]
    seen: set[int] = set()
    distinct = []
    for layer in members:
        distinct.append([p for p in layer if id(p) not in seen])
        seen.update(map(id, layer))
    return [[p for p in module.parameters() if id(p) not in seen], *distinct]


def offload_states(
    optimizers: Sequence[Optimizer],
    layers: Sequence[Sequence[nn.Parameter]],
    offload: Mapping[str, str],
    device: torch.device,
    watched: Sequence[Optimizer],
    until: contextlib.ExitStack,
    zero: ZeroSharding | None,
    shared_by: dist.ProcessGroup | None = None,
) -> list[OffloadedStates]:
    """Step layer by layer, if there is anything to bring to where states are, or to leave in a file.

    Args:
        optimizers: Of the run.
        layers: All parameters, layer by layer.
        offload: Where what is.
        device: Of this rank.
        watched: Optimizers that may look at all parameters in their step.
        until: Closed when the run ends.
        zero: What shares out parameters, which may be in files too.
        shared_by: Ranks that share out the steps of parameters which each of them holds whole.
    """
    devices, where = StorageDevices.of(offload, device), offload.get("optimizer_states")
    regions = {} if zero is None else zero.regions
    if where is None and not regions and devices.between_steps == devices.states:
        return []
    folder = None if where is None or where == "cpu" else where.removeprefix("disk:")
    found: list[OffloadedStates] = []
    for optimizer in optimizers:
        sees_all = any(other is optimizer for other in watched)
        why = "may look at all of the model" if sees_all else why_not_layerwise(optimizer, in_file=folder is not None)
        if not why:
            numel = Tensor.numel if shared_by is None else partial(numel_of_shard, ranks=shared_by)
            found.append(LayerwiseStep(optimizer, layers, folder, regions, states_on=devices.states, numel=numel))
        else:
            rank_zero_info(describe_at_once(optimizer, why))
            found.append(AllParametersStep(optimizer, folder, regions.values(), states_on=devices.states))
        until.callback(found[-1].close)
    return found


def describe_at_once(optimizer: Optimizer, why: str) -> str:
    """One line: why the states of an optimizer are all in memory for a moment."""
    return f"offload: {type(optimizer).__name__} {why}, so all of its states are brought for a step, and leave after it"


def hold_in_evaluation(trainer: Any, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Gather wholes once for each validation: after callbacks have put other weights in place, before its first batch.

    Args:
        trainer: About to fit.
        begin: Gathers them.
        end: Frees them.

    Returns:
        What undoes it.
    """

    def on_run_start(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        begin()

    def on_run_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        end()
        return original(*args, **kwargs)

    loop, undo = trainer.fit_loop.epoch_loop.val_loop, contextlib.ExitStack()
    undo.callback(around(loop, "on_run_start", on_run_start, reason="full tensors for a validation"))
    undo.callback(around(loop, "on_run_end", on_run_end, reason="full tensors for a validation"))
    return undo.close
