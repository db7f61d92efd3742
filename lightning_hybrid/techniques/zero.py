"""ZeRO: replicas hold shards of parameters, gradients and optimizer states."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.errors import PrecisionError
from lightning_hybrid.memory.free import free_bytes
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.params.guards import can_guard
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.precision.message_dtypes import message_dtypes
from lightning_hybrid.predict.ranks import Footprint
from lightning_hybrid.step.objects.modules import find_layers, names_around
from lightning_hybrid.step.standins.tensors import full_shape, is_absent
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.techniques.adascale import has_adascale
from lightning_hybrid.techniques.technique import Active, Messages, Operation, Technique

if TYPE_CHECKING:
    from lightning_hybrid.optimizers.state_file import Region
    from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
    from lightning_hybrid.zero.sharding import Stage

# Share of the memory free at the start of a run that full layers and their gradients may take.
_FREE_MEMORY_SHARE = 0.25
_Axes = tuple[str, str]  # over which ranks hold shards, and copies
_AXIS_NAMES = {"pp": "pipeline", "cp": "context", "tp": "tensor"}
_OF_ALL: _Axes = ("dp_shard", "dp_replicate")
_OF_SOME: _Axes = ("ep_shard", "ep_outer")  # experts, which a part of the replicas has


class Zero(Technique):
    """Replicas of a shard group hold shards.

    After Rajbhandari et al. (arXiv 1910.02054): stage 1 shards optimizer states, 2 gradients too, 3 parameters too.

    Attributes:
        stage: 1 to 3.
    """

    def __init__(self, stage: int, shardings: Sequence[AxisSharding] = ()) -> None:
        self.stage, self.shardings, self.option = stage, tuple(shardings), f"zero_stage={stage}"
        self._per_layer: bool | None = None  # once it is built
        self._read_outside: frozenset[str] = frozenset()  # FQNs of parameters of layers that other code reads

    @staticmethod
    def check(options: Options, mesh: Mesh, precision: object, *, is_manual: bool) -> None:
        """Refuse what does not go with it.

        Raises:
            LayoutError: There is one replica.
            PrecisionError: Nothing is gathered in ``gather_dtype``, or a step would read the rounded values.
        """
        options.check_replicas(mesh.layout)
        if (dtype := message_dtypes(precision)["gather_dtype"]) is None:
            return
        if not options.zero_stage:
            raise PrecisionError(
                f"gather_dtype={dtype} is for parameters that ZeRO gathers, but zero_stage=0 gathers none;"
                " set zero_stage=1, 2 or 3, or leave it out",
                entry="precision-message-unused",
            )
        if is_manual:
            raise PrecisionError(
                f"gather_dtype={dtype}: in manual optimization optimizers step full parameters, of which"
                " the gathered values would be rounded; leave it out, or use automatic optimization",
                entry="precision-message-unused",
            )

    def watches(self, run: Any) -> bool:
        """Return whether there are stages: without them, a read gathers."""
        return run.is_pipelined

    @contextlib.contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """Observe parameters of a layer that code outside of it reads, as in ``self.positions.weight[:n]``.

        They are no layer's own to gather and free.
        """
        from lightning_hybrid.tensor.search.uses import record_calls

        units = variant.recording.units
        with record_calls(find_layers(units), units) as calls:
            yield
        self._read_outside = frozenset(
            f"{layer}.{name}" for layer, names in calls.read_outside.items() for name in names
        )

    def place(self, run: Any, earlier: Sequence[AxisSharding]) -> Sequence[AxisSharding]:
        """Shard each parameter over the ranks of a shard; an expert over the ranks among them that have it."""
        from lightning_hybrid.zero.ranks import shard_placement

        mesh, named = run.mesh, run.setting.module.named_parameters()
        unreplicated = {name for sharding in earlier if sharding.axis == "ep" for name in sharding.placements}
        shapes = {name: shard_of(earlier, name, parameter.shape).shape for name, parameter in named}
        found = []
        for axis, names in (("dp_shard", shapes.keys() - unreplicated), ("ep_shard", unreplicated)):
            if not names or mesh.size(axis) == 1:
                continue
            group = mesh.group(axis)
            placements = {n: shard_placement(torch.Size(shapes[n]), group.size()) for n in shapes if n in names}
            sharded = {name: placement for name, placement in placements.items() if placement is not None}
            found.append(AxisSharding(group, sharded, axis=axis, places=mesh.places(axis)))
        self.shardings = tuple(found)
        return found

    def of_rank(self, shardings: Mapping[int, AxisSharding]) -> Zero:
        """Return it as another rank has it, with these shardings by the ids of this rank's shardings."""
        other = Zero(self.stage, [shardings[id(each)] for each in self.shardings])
        other._read_outside = self._read_outside
        return other

    def build(self, run: Any, owner: Any) -> Active:
        """Group the local shards of parameters by layer and stage, and gather and reduce each group."""
        from lightning_hybrid.params.reads.agreement import HookAgreement
        from lightning_hybrid.zero.group import ParameterGroup
        from lightning_hybrid.zero.ranks import ShardRanks, bytes_of_shards
        from lightning_hybrid.zero.sharding import ZeroSharding
        from lightning_hybrid.zero.storage import StorageDevices

        if not self.shardings:
            return Active()
        setting, mesh, dtypes = run.setting, run.mesh, message_dtypes(run.setting.precision)
        module, device, offload = setting.module, setting.device, setting.options.offloaded
        found = (_OF_ALL, _OF_SOME) if run.names_over("ep") else (_OF_ALL,)
        ranks_on = {axes: ShardRanks(mesh.group(axes[0]), mesh.group(axes[1]), **dtypes) for axes in found}
        ranks = ranks_on[_OF_ALL]
        placements = {name: placement for each in self.shardings for name, placement in each.placements.items()}
        members = members_of_groups(run, self._read_outside)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        sparse = {names[id(m.weight)] for m in module.modules() if getattr(m, "sparse", None) is True}
        groups: dict[Stage, list[ParameterGroup]] = {}
        devices = StorageDevices.of(offload, device)
        regions = _regions(offload.get("parameters"), [bytes_of_shards(each, placements) for each in members.values()])
        for (of, fqn, _, axes), parameters in members.items():
            group = ParameterGroup(
                fqn,
                parameters,
                placements,
                ranks_on[axes],
                keeps_full=self.stage < 3,
                devices=devices,
                region=next(regions, None),
                sparse=sparse,
            )
            groups.setdefault(of, []).append(group)
        by_layer = self._is_short(run, sum(_full_bytes(p) for group in members.values() for p in group.values()))
        if setting.options.reshard_after_forward == "auto":
            by_layer = setting.world.decide(by_layer, all_ranks=False)
        meet = partial(setting.world.rendezvous, compares=False)
        agreements = [HookAgreement(each.shard, device, meet, "data") for each in ranks_on.values()]
        active = ZeroSharding(module, groups, ranks, device, per_layer=by_layer, agreements=agreements)
        self._per_layer = by_layer
        if by_layer and ranks.shard.size() > 1:
            # Evaluation may leave the trace of a stage on some ranks, and uses full experts.
            active.gather_in_rounds(mesh, in_evaluation=mesh.size("pp") == 1 and len(ranks_on) == 1)
        if run.runner is not None and run.runner.guards is not None:  # a recording shows what steps read otherwise
            active.gather_on_read(run.runner.guards)
            run.runner.guards.before_shard_access.append(active.writes.before_shards)
            run.runner.guards.after_shard_access.append(active.writes.after_shards)
        run.until_end.callback(active.close)
        return active

    def step_in_user_step(self, run: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Let optimizers step local shards of parameters, which are full meanwhile, or full ones on every rank."""
        from lightning_hybrid.optimizers.trial import can_step_shards, combines_parameters
        from lightning_hybrid.zero.manual_step import ShardedStep

        if not self.shardings:
            return []
        named = dict(run.setting.module.named_parameters())
        full = [each for each in optimizers if combines_parameters(each) or not can_step_shards(each)]
        shardings = [
            (each.group, {id(named[name]): p for name, p in each.placements.items()}) for each in self.shardings
        ]
        for optimizer in optimizers:
            if optimizer not in full:
                run.until_end.callback(ShardedStep(optimizer, shardings).close)
        return full

    def gathers_per_layer(self, run: Any) -> bool:
        """Return whether layers are gathered one by one, in a run that is built or only planned."""
        if self._per_layer is not None:
            return self._per_layer
        full = [each for each in run.parts.shardings if not any(each is own for own in self.shardings)]
        named = run.setting.module.named_parameters()
        local = [(n, p) for n, p in named if not run.is_pipelined or 0 in run.plan.stages_of(n)]
        shapes = [(p, shard_of(full, name, full_shape(p)).shape) for name, p in local]
        return self._is_short(run, sum(math.prod(shape) * p.element_size() for p, shape in shapes))

    def _is_short(self, run: Any, full_bytes: int) -> bool:
        """Whether layers are gathered one by one: as the option says, or by the memory that is free."""
        wanted = run.setting.options.reshard_after_forward
        if has_adascale(run.setting.trainer):
            return False
        return 2 * full_bytes > _FREE_MEMORY_SHARE * free_bytes(run.setting.device) if wanted == "auto" else wanted

    def lines(self, run: Any) -> list[str]:
        """Return what is sharded over how many replicas, and when it is gathered."""
        if not self.shardings:
            return []
        what = ["optimizer states", "gradients", "parameters"][: self.stage]
        listed = what[0] if self.stage == 1 else f"{', '.join(what[:-1])} and {what[-1]}"
        by_layer = self.gathers_per_layer(run)
        line = (
            f"zero_stage={self.stage}: {listed} sharded over {_holders(run.mesh)}, gathered and reduced"
            f" {'layer by layer, for each microbatch' if by_layer else 'once per step'}"
        )
        by_memory = run.setting.options.reshard_after_forward == "auto" and not has_adascale(run.setting.trainer)
        if by_memory and self.stage == 3 and not by_layer:
            line += " (memory is ample; reshard_after_forward=True holds two layers at a time)"
        return [line]

    def footprint(self, run: Any, parameters: Sequence[Any]) -> Footprint | None:
        """Return the bytes of shards, and of the layers that are full for a moment: two, or all of them."""
        if not self.shardings:
            return None
        layers, again = dict[str, int](), {fqn for fqn, policy in run.policies.items() if policy != "keep"}
        for each in parameters:
            size = (each.nbytes if self.stage == 3 else 0) + each.gradient_bytes
            # What is recomputed as one is full at a time.
            layer = next((fqn for fqn in names_around(each.layer) if fqn in again), each.layer)
            layers[layer] = layers.get(layer, 0) + size
        outside, sizes = layers.pop("", 0), sorted(layers.values())
        return Footprint(
            parameters=sum(each.shard_bytes if self.stage == 3 else each.nbytes for each in parameters),
            gradients=sum(each.gradient_shard_bytes for each in parameters),
            gathered=outside + sum(sizes[-2:] if self.gathers_per_layer(run) else sizes),
        )

    def messages(self, run: Any, num_microbatches: int) -> Iterator[Messages]:
        """Return the gathers of parameters, and the averages of gradients."""
        from lightning_hybrid.collectives.tensors import aligned_numel
        from lightning_hybrid.zero.ranks import numel_of_largest_shard

        if not self.shardings:
            return
        mesh, dtypes = run.mesh, message_dtypes(run.setting.precision)
        placements = {name: placement for each in self.shardings for name, placement in each.placements.items()}
        by_layer = self.gathers_per_layer(run)
        totals: Counter[tuple[str, Operation, int]] = Counter()
        counts: Counter[tuple[str, Operation, int]] = Counter()

        def add(content: str, operation: Operation, axis: str, count: int, nbytes: int) -> None:
            if mesh.size(axis) > 1 and count:
                totals[content, operation, mesh.size(axis)] += count * nbytes
                counts[content, operation, mesh.size(axis)] += count

        named, plan = dict(run.setting.module.named_parameters()), run.plan
        if run.is_pipelined and plan.is_partitioned:
            named = {name: p for name, p in named.items() if plan.rank in plan.ranks_of(name)}
        shapes = {name: shard_of(run.parts.shardings, name, full_shape(p)).shape for name, p in named.items()}
        groups = members_of_groups(run, self._read_outside, names=set(shapes))
        for (stage, layer, dtype, (shard_axis, copies_axis)), members in groups.items():
            sizes = {n: numel_of_largest_shard(torch.Size(shapes[n]), placements.get(n)) for n in members}
            shard = sum(size for name, size in sizes.items() if name in placements)
            gathers = (2 * num_microbatches if by_layer and self.stage == 3 and layer else 1) if shard else 0
            sent = dtypes["gather_dtype"] or dtype
            add("parameters", "all_gather", shard_axis, gathers, aligned_numel(shard, sent) * sent.itemsize)
            trained = [name for name, parameter in members.items() if parameter.requires_grad]
            sent = dtypes["reduce_dtype"] or dtype
            row = aligned_numel(sum(sizes[name] for name in trained) + len(trained), sent) * sent.itemsize
            times = (num_microbatches if by_layer and stage is not None else 1) if trained else 0
            add("averages of gradients", "reduce_scatter", shard_axis, times, row * mesh.size(shard_axis))
            add("averages of gradients", "all_reduce", copies_axis, times, row)
        for (content, operation, size), nbytes in totals.items():
            yield Messages("data", content, operation, size, counts[content, operation, size], nbytes)


def _holders(mesh: Mesh) -> str:
    """The kind and number of the ranks that hold the shards: replicas, or pipeline ranks without stages."""
    size = mesh.size("dp_shard")
    if not mesh.sharded_axes:
        return f"{size} replicas"
    kinds = " x ".join(_AXIS_NAMES[axis] for axis in mesh.sharded_axes)
    shares = mesh.size("shares")
    return f"the {shares} {kinds} ranks" + (f" of {size // shares} replicas each" if size > shares else "")


def members_of_groups(
    run: Any, read_outside: Collection[str], names: Collection[str] | None = None
) -> dict[tuple[Stage, str, torch.dtype, _Axes], dict[str, nn.Parameter]]:
    """Return the local parameters by stage, layer, dtype and axes of shards and copies, in the order of layers.

    ``names`` are the FQNs of local ones; None for those that are not absent.
    """
    from lightning_hybrid.step.recording.units import choose_units
    from lightning_hybrid.techniques.reducers import stage_of_gradient

    module, plan = run.setting.module, run.plan
    units = choose_units(module, 1) if plan.num_ranks == 1 or plan.first is None else plan.first.recording.units
    layers = find_layers(units)
    layer_of = _layer_of_parameters(module, layers, plan, read_outside)
    unequal = {name for technique in run.techniques for name in technique.unequally_read()}
    layer_of = {name: fqn for name, fqn in layer_of.items() if name not in unequal}
    unreplicated = run.names_over("ep")
    members: dict[tuple[Stage, str, torch.dtype, _Axes], dict[str, nn.Parameter]] = {}
    order = {fqn: number for number, fqn in enumerate(["", *layers])}
    every = dict(module.named_parameters())
    local = {name: p for name, p in every.items() if (not is_absent(p) if names is None else name in names)}
    for name, parameter in sorted(local.items(), key=lambda item: order[layer_of.get(item[0], "")]):
        axes = _OF_SOME if name in unreplicated else _OF_ALL
        key = stage_of_gradient(plan, name), layer_of.get(name, ""), parameter.dtype, axes
        members.setdefault(key, {})[name] = parameter
    return members


def _regions(where: str | None, sizes: Sequence[int]) -> Iterator[Region]:
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
