"""The planner's costs of the user's module: its step is recorded in this process, on one batch of its own loader."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.planner.costs.costs_from_step_graph import costs_from_parameters, costs_from_step_graph
from lightning_hybrid.planner.costs.layer_costs import ModelCosts
from lightning_hybrid.planner.number_format_of_precision import number_format_of
from lightning_hybrid.planner.plan_layout import NumberFormat
from lightning_hybrid.step.batch.split_batch_into_microbatches import batch_size_of, elements_per_sample
from lightning_hybrid.step.objects.repeated_layers import find_layers
from lightning_hybrid.step.recording.choose_units import num_elements
from lightning_hybrid.strategies.options.plan_auto_sizes import frozen_names, parameter_shapes
from lightning_hybrid.strategies.out_of_memory.refuse_unsupported_options import batch_norms_in_training
from lightning_hybrid.strategies.plan_copies_on_two_ranks import why_not_in_two_stages
from lightning_hybrid.strategies.plan_in_one_process import MetaPlanningStrategy, make_plan
from lightning_hybrid.strategies.run.run_and_optimization_dataclasses import Run
from lightning_hybrid.strategies.start.example_batch import example_of_fit

_STAGES = 4  # an nn.Sequential with more parameters than one of so many stages can be shared among them


@dataclass(frozen=True)
class RecordedCosts:
    """What the planner needs to know of a module.

    Attributes:
        costs: Of its training step.
        number_format: Of its parameters and of its optimizer's states.
        samples: Samples of a batch of its loader.
    """

    costs: ModelCosts
    number_format: NumberFormat
    samples: int


class _CostRecordingStrategy(MetaPlanningStrategy):
    """Records the step of one process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recorded: Assignment | None = None
        self.samples: int | None = None
        self.sample_elements = 0.0
        self.part_of: dict[str, str] = {}  # the layer of each module inside of an opened nn.Sequential

    def _layers(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the layers that would be recomputed, or the modules inside of a large ``nn.Sequential``."""
        found: dict[str, nn.Module] = {}
        most = num_elements(module) / _STAGES
        for name, layer in find_layers(dict(module.named_children())).items():
            is_open = isinstance(layer, nn.Sequential) and num_elements(layer) > most
            inside = {f"{name}.{inner}": child for inner, child in layer.named_children() if num_elements(child)}
            found |= inside if is_open else {name: layer}
            self.part_of |= dict.fromkeys(inside, name) if is_open else {}
        return found

    def _describe(self, run: Run, recorded: Assignment | None) -> None:
        super()._describe(run, recorded)
        self.recorded = recorded
        batch = example_of_fit(run.setting.trainer, run.setting.options.example_batch)
        self.samples, self.sample_elements = batch_size_of(batch), elements_per_sample(batch) or 0.0


def record_costs(
    lightning: ModuleType,
    module: Any,
    fit_arguments: Mapping[str, Any],
    precision: str,
    on_phase: Callable[[str], None] | None = None,
    example_batch: Any = None,
) -> RecordedCosts:
    """Record the training step of a module in one process, and return its costs.

    A step that cannot be recorded is estimated from the parameters, which the notes of the costs say. This process must
    have no process groups; an error of the user's code is raised.

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
    no_stages = why_not_in_two_stages(lightning, module, fit_arguments, options, precision)
    strategy = make_plan(
        lightning, module, fit_arguments, 1, options, precision, on_phase, strategy_class=_CostRecordingStrategy
    )
    assert isinstance(strategy, _CostRecordingStrategy)
    shapes, frozen = parameter_shapes(module), frozen_names(module)
    memory = strategy.memory[0]
    trained = sum(math.prod(shapes[name]) for name in shapes.keys() - set(frozen))
    states = None if memory.optimizer_states is None or not trained else memory.optimizer_states / trained
    number_format = number_format_of(precision, states)
    samples = strategy.samples or 1
    if strategy.recorded is None:
        reason = _first_line(strategy.failures[-1]) if strategy.failures else "it cannot be traced"
        costs = costs_from_parameters(shapes, name=name, frozen=frozen, reason=reason)
    else:
        graph, part_of = strategy.recorded.graph, strategy.part_of
        costs = costs_from_step_graph(graph, shapes, samples=samples, name=name, frozen=frozen, part_of=part_of)
    costs = dataclasses.replace(costs, sample_elements=strategy.sample_elements)
    return RecordedCosts(with_limits_of(module, costs, no_stages), number_format, samples)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def with_limits_of(module: nn.Module, costs: ModelCosts, no_stages: str) -> ModelCosts:
    """Return the costs of a module with what rules out stages or microbatches, and a note on it.

    Args:
        module: The module.
        costs: Its costs.
        no_stages: Why its step cannot be run in stages; "" if it may.
    """
    if no_stages:
        note = f"no plan has pipeline ranks or microbatches: {no_stages}"
        costs = dataclasses.replace(costs, why_no_stages=no_stages, notes=(*costs.notes, note))
    norms = batch_norms_in_training(module)
    if not norms:
        return costs
    note = f"BatchNorm ({norms[0]}) takes statistics of each microbatch: a replica's batch is one, unless you set more"
    return dataclasses.replace(costs, has_batch_norm=True, notes=(*costs.notes, note))
