"""The planner's costs of the user's module: its step is recorded in this process, on one batch of its own loader."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.experts.parallel.costs import ExpertCosts
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.params.placement import Replicated
from lightning_hybrid.planning.maps import ReadMaps
from lightning_hybrid.planning.plan import PlanRequest, RunPlan, make_plan
from lightning_hybrid.predict.costs.layers import FeatureMap, ModelCosts, Routing
from lightning_hybrid.predict.costs.module import costs_from_parameters, costs_from_step_graph
from lightning_hybrid.predict.layout import NumberFormat, number_format_of
from lightning_hybrid.run.description.recording import record_in_one_stage
from lightning_hybrid.run.execution.fit import batch_norms_in_training
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.module_state.copies import copy_on_meta
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.recording.units import num_elements
from lightning_hybrid.step.standins.kernels import AttentionHeads
from lightning_hybrid.strategies.options.auto_sizes import frozen_names, parameter_shapes
from lightning_hybrid.strategies.user_code.hooks import why_no_stages
from lightning_hybrid.techniques.tensor import TensorParallel

_STAGES = 4  # an nn.Sequential with more parameters than one of so many stages can be shared among them


@dataclass(frozen=True)
class RecordedCosts:
    """What the planner needs to know of a module."""

    costs: ModelCosts  # of its training step
    number_format: NumberFormat  # of its parameters and of its optimizer's states
    samples: int  # samples of a batch of its loader


class _LayerRecording:
    """Records the step of one process, with its layers as units, their experts and their heads.

    Attributes:
        part_of: The layer of each module inside of an opened ``nn.Sequential``.
        routings: Experts of each unit.
        heads: Of attention.
        maps: What convolutions and norms of each unit read.
    """

    def __init__(self) -> None:
        self.part_of: dict[str, str] = {}
        self.routings: Mapping[str, Sequence[Routing]] = {}
        self.heads = AttentionHeads()
        self.maps: Mapping[str, Sequence[FeatureMap]] = {}

    def __call__(self, run: Run, failures: list[Exception]) -> Assignment | None:
        """Record the step, and again where members of lists turn out to be experts: these are inside of layers."""
        module = run.setting.module
        costs = ExpertCosts(module)
        recorded = self._record(run, failures, costs)
        lists = _lists_with_routed_rows(module, None if recorded is None else recorded.graph)
        if lists and not self.routings:
            again = self._record(run, failures, costs, lists)
            recorded = again if self.routings or recorded is None else recorded
        return recorded

    def _record(
        self, run: Run, failures: list[Exception], costs: ExpertCosts, lists: Collection[nn.Module] = ()
    ) -> Assignment | None:
        units: dict[str, nn.Module] = {}
        maps = ReadMaps()

        @contextlib.contextmanager
        def watching(recorded: Mapping[str, nn.Module]) -> Iterator[None]:
            units.clear()
            units.update(recorded)
            with costs.watching(recorded), maps.watching(recorded):
                yield

        layers, self.part_of = _layers(run.setting.module, lists)
        with self.heads:
            recorded = record_in_one_stage(run, run.randomness, layers, failures, watching)
        self.routings, self.maps = costs.sets(units), maps.sets(units)
        return recorded


def _layers(module: nn.Module, lists: Collection[nn.Module]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers that would be recomputed, or the modules inside of a large ``nn.Sequential``, and its FQN."""
    found, part_of = dict[str, nn.Module](), dict[str, str]()
    most = num_elements(module) / _STAGES
    for name, layer in find_layers(dict(module.named_children()), lists).items():
        is_open = isinstance(layer, nn.Sequential) and num_elements(layer) > most
        inside = {f"{name}.{inner}": child for inner, child in layer.named_children() if num_elements(child)}
        found |= inside if is_open else {name: layer}
        part_of |= dict.fromkeys(inside, name) if is_open else {}
    return found, part_of


def _lists_with_routed_rows(module: nn.Module, graph: StepGraph | None) -> list[nn.Module]:
    """Return lists whose members were all called with numbers of rows that values decide, as experts are.

    Without a graph, as where a loop over experts reads values: lists inside of members of other lists.
    """
    lists = {name: each for name, each in module.named_modules() if isinstance(each, nn.ModuleList | nn.ModuleDict)}
    if graph is None:
        return [each for name, each in lists.items() if any(name.startswith(f"{other}.") for other in lists)]
    calls: dict[str, list[bool]] = {}
    for node in graph.nodes:
        if node.unit:
            dynamic = any(graph.values[index].dynamic for index in node.inputs)
            calls.setdefault(node.unit.rpartition(".")[0], []).append(dynamic)
    return [lists[name] for name, dynamic in calls.items() if name in lists and len(dynamic) > 1 and all(dynamic)]


def record_costs(
    lightning: ModuleType,
    module: Any,
    fit_arguments: Mapping[str, Any],
    precision: str,
    on_phase: Callable[[str], None] | None = None,
    example_batch: Any = None,
) -> RecordedCosts:
    """Record the training step of a module in one process, and return its costs.

    A step that cannot be recorded is estimated from the parameters, which the notes of the costs say. An error of the
    user's code is raised.

    Args:
        lightning: The namespace of the module.
        module: The user's module; not to be used afterwards.
        fit_arguments: Arguments of ``Trainer.fit``.
        precision: Lightning's name of the precision.
        on_phase: Receives the name of each phase as it begins.
        example_batch: A batch to record with; the first of the loader if None.
    """
    name = type(module).__name__
    options = {} if example_batch is None else {"example_batch": example_batch}
    copies = CopiesOnTwoRanks(lightning, module, fit_arguments, options, precision, on_phase)
    no_stages, sharded = copies.why_no_stages(), copies.sharded_parameters()
    recording = _LayerRecording()
    request = PlanRequest(has_storage=False, record=recording, on_phase=on_phase)
    plan = make_plan(lightning, module, fit_arguments, 1, options, precision, request)
    shapes, frozen = parameter_shapes(module), frozen_names(module)
    trained = sum(math.prod(shapes[name]) for name in shapes.keys() - set(frozen))
    states = plan.memory[0].optimizer_states
    number_format = number_format_of(precision, None if states is None or not trained else states / trained)
    samples = plan.batch.samples or 1
    if plan.recorded is None:
        reason = first_line(plan.failures[-1]) if plan.failures else "it cannot be traced"
        costs = costs_from_parameters(shapes, name=name, frozen=frozen, reason=reason)
    else:
        costs = costs_from_step_graph(
            *(plan.recorded.graph, shapes),
            samples=samples,
            name=name,
            frozen=frozen,
            part_of=recording.part_of,
            routings=recording.routings,
            heads=recording.heads.common_numbers(samples),
            sharded=sharded,
            maps=recording.maps,
        )
    costs = dataclasses.replace(costs, sample_elements=plan.sample_elements)
    return RecordedCosts(with_limits_of(module, costs, no_stages), number_format, samples)


def first_line(error: Exception) -> str:
    """Return the type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def with_limits_of(module: nn.Module, costs: ModelCosts, no_stages: str) -> ModelCosts:
    """Return the costs of a module with what rules out stages (``no_stages``) or microbatches, and a note on it."""
    if no_stages:
        note = f"no plan has pipeline ranks or microbatches: {no_stages}"
        costs = dataclasses.replace(costs, why_no_stages=no_stages, notes=(*costs.notes, note))
    norms = batch_norms_in_training(module)
    if not norms:
        return costs
    note = f"BatchNorm ({norms[0]}) takes statistics of each microbatch: a replica's batch is one, unless you set more"
    return dataclasses.replace(costs, has_batch_norm=True, notes=(*costs.notes, note))


_HOLDERS = (DataLoader, Dataset, pl.LightningDataModule, pl.LightningModule)


@dataclass(frozen=True)
class CopiesOnTwoRanks:
    """Plans copies of a module, without storage for its parameters, on two ranks."""

    namespace: ModuleType  # that of Lightning to which the module belongs
    module: Any  # the user's module
    fit_arguments: Mapping[str, Any]  # arguments of ``Trainer.fit``
    options: Mapping[str, Any]  # arguments of the strategy
    precision: str  # Lightning's name of the precision
    on_phase: Callable[[str], None] | None = None  # receives the name of each phase as it begins

    def why_no_stages(self) -> str:
        """Return why the step cannot be run in two stages; "" if it can, or if that cannot be told."""
        if reason := why_no_stages(self.module):
            return reason
        plan = self._plan(pipeline_parallel_size=2)
        return "" if plan is None else plan.why_no_stages

    def sharded_parameters(self) -> frozenset[str] | None:
        """Return the FQNs of parameters that two tensor ranks shard; None if that cannot be told."""
        plan = self._plan(tensor_parallel_size=2, num_microbatches=1)
        if plan is None or plan.partition is None:
            return None
        run = plan.run
        planner, shards = run.technique(TensorParallel), run.shards
        if shards is None and (planner is None or not planner.planned_calls.arguments):
            return None  # no call of a layer was recorded
        plans = {} if shards is None else shards.plans
        return frozenset(
            f"{unit}.{name}" if unit else name
            for unit, found in plans.items()
            for name, placement in found.placements.items()
            if not isinstance(placement, Replicated)
        )

    def _plan(self, **layout: int) -> RunPlan | None:
        memo = tensors_of_datasets(self.module, list(self.fit_arguments.values()))
        request = PlanRequest(has_storage=False, describes=False, on_phase=self.on_phase)
        try:
            copied, data = copy_on_meta((self.module, dict(self.fit_arguments)), only_parameters=True, memo=memo)
            return make_plan(self.namespace, copied, data, 2, {**self.options, **layout}, self.precision, request)
        except Exception:  # of the user's code too, which the recording of costs raises
            return None


def tensors_of_datasets(*holders: Any) -> dict[int, Any]:
    """Return tensors and arrays of datasets, by their identity as `copy.deepcopy` notes what is copied.

    They are read alone, and may take as much memory as there is.
    """
    found: dict[int, Any] = {}
    known, open_ = set[int](), [(holder, True) for holder in holders]
    while open_:
        values, is_data = open_.pop()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor | numpy.ndarray):
                if is_data:
                    found[id(leaf)] = leaf
            elif isinstance(leaf, _HOLDERS) and id(leaf) not in known:
                known.add(id(leaf))
                open_.append((vars(leaf), isinstance(leaf, DataLoader | Dataset)))
    return found
