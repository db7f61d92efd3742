"""The options that "auto" sizes stand for: one rank plans the run on a copy of the module, before the ranks meet."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hybrid.callbacks.lost_time.files import path_of_measured_costs
from lightning_hybrid.memory.amounts import parse_budget
from lightning_hybrid.memory.free import free_on_host
from lightning_hybrid.planning.costs import (
    RecordedCosts,
    first_line,
    record_costs,
    tensors_of_datasets,
    with_limits_of,
)
from lightning_hybrid.predict.costs.module import PROOF, ROUTING_PROOF, costs_from_parameters
from lightning_hybrid.predict.hardware import Hardware, load_hardware, preset_names
from lightning_hybrid.predict.layout import Allowed, PlanLayout, fixed_fields, number_format_of, strategy_options
from lightning_hybrid.predict.measured import corrected
from lightning_hybrid.predict.plans import Plan, SearchResult
from lightning_hybrid.predict.report import PlannedRun, ranked_lines
from lightning_hybrid.predict.search import cluster_of, predict_plan, search_layouts
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta
from lightning_hybrid.step.module_state.copies import copy_on_meta
from lightning_hybrid.strategies.hybrid3d import OPTION_DEFAULTS, Hybrid3DStrategy
from lightning_hybrid.strategies.options.auto_sizes import frozen_names, parameter_shapes, replicas_fit
from lightning_hybrid.strategies.user_code.hooks import why_no_stages

_PLANS = 3  # printed


def planned_options(strategy: Hybrid3DStrategy, trainer: pl.Trainer) -> tuple[dict[str, Any], Plan | None]:
    """Return options of the strategy by their names: one for each size that is "auto", and what else is planned.

    Plain replicas are kept where they fit. What the user has set is kept.

    Args:
        strategy: With sizes that are "auto".
        trainer: About to run.

    Returns:
        The options and their plan; none where no plan is requested, and replicas leave room for activations.

    Raises:
        PlanError: No layout fits.
    """
    sizes: dict[str, Any] = {name: 1 for name, size in strategy.options.sizes.items() if size == "auto"}
    sizes.pop("data_parallel_size", None)
    states = GeneratorStates(torch.device("cpu"))
    try:
        recorded = _recorded(strategy, trainer)
    finally:
        states.restore()
    if recorded is None:
        return {}, None
    run = _planned_run(strategy, recorded, path_of_measured_costs(trainer))
    layout = run.result.best.layout
    hidden = {ROUTING_PROOF} if layout.routed_ranks == 1 else set()
    hidden |= {PROOF} if layout.tensor == 1 else set()
    notes = [f"note: {note}" for note in run.costs.notes if note not in hidden]
    rank_zero_info("\n".join([f"hybrid3d: plan of {run.title}", *ranked_lines(run, _PLANS), *notes]))
    user = strategy.options.changed(OPTION_DEFAULTS)
    options = {name: value for name, value in strategy_options(layout).items() if name in sizes or name not in user}
    if strategy.options.objective == "largest_batch":
        options.pop("num_microbatches", None)
        size = layout.microbatch
        rank_zero_info(f"hybrid3d: the largest batch of a replica that is computed at a time has {size} samples")
    if strategy.options.stage_widths == "auto":
        options["stage_widths"] = list(layout.widths) or None
    options = {**sizes, **options}
    _log(trainer, run, options)
    return options, run.result.best


def _log(trainer: pl.Trainer, run: PlannedRun, options: Mapping[str, Any]) -> None:
    """Give the loggers the planned options with their predictions, beside the user's hyperparameters."""
    plan = run.result.best
    predicted = {"predicted_bytes": plan.memory.peak}
    if plan.time is not None:
        predicted["predicted_seconds_per_step"] = plan.time.seconds
    for logger in trainer.loggers:
        logger.log_hyperparams({"hybrid3d_plan": {**options, **predicted}})


def _recorded(strategy: Hybrid3DStrategy, trainer: pl.Trainer) -> RecordedCosts | None:
    """Record the step of a copy of the module, without storage for its parameters, on a batch of a copy of its loader.

    Returns:
        None where no plan is requested, and replicas leave room for activations.
    """
    options, module = strategy.options, strategy.lightning_module
    assert module is not None
    precision = str(getattr(strategy.precision_plugin, "precision", "32-true"))
    shapes, frozen = parameter_shapes(module), frozen_names(module)
    try:
        copied, data = _copied(module, trainer)
        shapes, frozen = parameter_shapes(copied), frozen_names(copied)
        if not options.asks_for_plan and replicas_fit(strategy, copied):
            return None
        lightning = importlib.import_module(pl.__name__)
        return record_costs(lightning, copied, data, precision, example_batch=options.example_batch)
    except Exception as error:  # of the user's code too: the run itself raises it, where its place is known
        if not options.asks_for_plan and replicas_fit(strategy, module):
            return None
        name = type(module).__name__
        costs = costs_from_parameters(shapes, name=name, frozen=frozen, reason=first_line(error))
        return RecordedCosts(with_limits_of(module, costs, why_no_stages(module)), number_format_of(precision), 1)


def _copied(module: pl.LightningModule, trainer: pl.Trainer) -> tuple[Any, Mapping[str, Any]]:
    """Return a copy of a module with all of its layers, but no storage for parameters, and arguments for its fit."""
    datamodule = getattr(trainer, "datamodule", None)
    data = datamodule or trainer.fit_loop._data_source.instance
    memo = {id(trainer): None, **tensors_of_datasets(module, data)}
    copied, data = copy_on_meta((module, None if data is module else data), only_parameters=True, memo=memo)
    if is_overridden("configure_model", copied, pl.LightningModule):
        with parameters_on_meta():
            copied.configure_model()
    kind = "train_dataloaders" if datamodule is None else "datamodule"
    return copied, {} if data is None else {kind: data}


def _planned_run(strategy: Hybrid3DStrategy, recorded: RecordedCosts, measured: Path | None) -> PlannedRun:
    options, number_format = strategy.options, recorded.number_format
    devices, num_nodes = strategy.num_processes, strategy.num_nodes
    hardware = _hardware(strategy.root_device, devices)
    costs = corrected(recorded.costs, number_format, hardware, measured)
    user = options.changed(OPTION_DEFAULTS)
    for option in ("max_memory", "recompute"):
        budget = parse_budget(user.get(option))
        if budget is not None:
            user.pop(option)  # a budget of recomputation fixes no policy: the least that fits is chosen
            limit = hardware.memory * (budget.share or 0.0) if budget.nbytes is None else float(budget.nbytes)
            limit += hardware.reserved if option == "recompute" else 0.0  # it counts tensors alone
            hardware = cluster_of(hardware, devices, num_nodes, limit)
    fixed = fixed_fields({**user, **options.sizes})
    ranks, samples = devices * num_nodes, recorded.samples
    plain = PlanLayout(replicate=ranks, microbatch=samples, batch=samples * ranks)
    is_free = all(getattr(plain, field, value) == value for field, value in fixed.items())
    result = None
    if is_free and options.objective != "largest_batch":
        plan = predict_plan(costs, plain, number_format, hardware)
        result = SearchResult((plan,), (), 1) if plan.fits_with_error else None
    result = result or search_layouts(
        costs,
        number_format,
        hardware,
        devices,
        num_nodes,
        batch=samples,
        is_replica_batch=True,
        objective=options.objective or "throughput",
        fixed=fixed,
        allowed=Allowed(widths=options.stage_widths == "auto", spatial=False),
    )
    return PlannedRun(result, costs, number_format, hardware, devices, num_nodes, number_format.name)


def _hardware(device: torch.device, devices: int) -> Hardware:
    """The preset of a device, with its own memory; on a CPU free memory, divided by the ranks of the node."""
    if device.type != "cuda":
        return dataclasses.replace(load_hardware("cpu"), memory=free_on_host() / devices, devices_per_node=devices)
    found = torch.cuda.get_device_properties(device)
    name = found.name.lower()
    words = name.replace("rtx ", "rtx")
    known = [preset for preset in preset_names() if re.search(rf"\b{preset.split('-')[0]}\b", words)]  # no RTX A1000
    hardware = [load_hardware(preset) for preset in known or ["a100-80"]]
    nearest = min(hardware, key=lambda each: abs(each.memory - found.total_memory))
    return dataclasses.replace(
        nearest, memory=float(found.total_memory), devices_per_node=devices, host_memory=free_on_host()
    )
