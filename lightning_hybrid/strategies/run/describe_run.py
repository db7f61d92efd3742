"""The table that is printed when a run starts, or its layout has changed: stages, messages and techniques."""

from __future__ import annotations

import math

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.step.batch_means.linear_means_of_loss import data_dependent_means
from lightning_hybrid.strategies.run.plan_stages_shards_and_layers import ModulePartition
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.techniques.check_and_describe_tensor_plans import describe_tensor_plans
from lightning_hybrid.strategies.techniques.recomputation import describe_policies
from lightning_hybrid.strategies.techniques.step_shards_in_manual_optimization import describe_manual_zero
from lightning_hybrid.strategies.techniques.zero_shardings_and_layer_groups import describe_zero

_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "bool": 1, "complex64": 8}


def describe_run(run: Run, partition: ModulePartition | None) -> str:
    """Return the start table: sizes, stages, messages, and what each technique found."""
    setting = run.setting
    options, layout = setting.options, setting.layout
    first = run.plan.first.assignment if run.plan is not None and run.plan.first is not None else None
    means = run.is_pipelined and options.microbatch_weight is None and options.microbatches != 1
    lines = [_describe_layout(layout, first, options.schedule, means=means)]
    if run.zero3_fallback is not None:
        lines.append(run.zero3_fallback.line)
    if partition is not None and run.shards is not None and partition.tensor_planner is not None:
        lines.append(describe_tensor_plans(run.shards.plans, partition.tensor_planner.summary))
    if partition is not None and partition.expert_planner is not None and partition.expert_planner.summary:
        lines.append(partition.expert_planner.summary)
    if run.zero is not None:
        lines.append(describe_zero(run.zero_stage, run.mesh.size("dp_shard"), per_layer=run.zero.per_layer))
    if setting.shards_manual_steps:
        lines.append(describe_manual_zero(options.zero_stage, layout.data_shard_size))
    if options.offloaded:
        stores = (f"{what.replace('_', ' ')} {where}" for what, where in options.offloaded.items())
        lines.append(f"offloaded: {', '.join(stores)}")
    if run.recomputation is not None:
        lines.append(describe_policies(run.recomputation.policies, setting.recompute))
    if run.compiled is not None:
        lines += run.compiled.lines()
    return "\n".join(lines)


def _describe_layout(
    layout: ParallelLayout, assignment: Assignment | None, schedule: str, *, means: bool = False
) -> str:
    """Return the layout in one line and, for a pipeline, one row per stage; and the means that microbatches share."""
    head = (
        f"hybrid3d: {layout.world_size} ranks = pipeline {layout.pipeline_parallel_size}"
        f" x data {layout.data_parallel_size} x tensor {layout.tensor_parallel_size}"
    )
    if layout.context_parallel_size > 1:
        head += f" x context {layout.context_parallel_size}"
    if assignment is None or assignment.num_stages == 1:
        return head
    graph, costs = assignment.graph, assignment.costs()
    rows = [("stage", "pipeline rank", "units", "parameters", "cost", "sends per microbatch")]
    for stage in range(assignment.num_stages):
        names = [name for name, stages in assignment.holders.items() if stage in stages]
        size = sum(graph.parameter_bytes[name] for name in names)
        sends = [
            f"{_bytes(sum(value_bytes(graph, v) for v in sent))} to {target}"
            for (source, target), sent in assignment.portals.items()
            if source == stage
        ]
        share = f"{100 * costs[stage] / sum(costs):.0f} %"
        units = _units(assignment, stage)
        rank = str(stage % layout.pipeline_parallel_size)
        rows.append((str(stage), rank, units, _bytes(size), share, ", ".join(sends) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    shared = [f"{name} on stages {list(stages)}" for name, stages in assignment.shared.items()]
    tail = [f"shared parameters: {', '.join(shared[:4])}{' ...' if len(shared) > 4 else ''}"] if shared else []
    tail += _means(graph) if means else []
    return "\n".join([f"{head}, schedule {schedule}", *lines, *tail])


def _means(graph: StepGraph) -> list[str]:
    """Return one line with the means over the full batch by which its microbatches weigh, if there are any."""
    nodes = [graph.nodes[index] for index in sorted(data_dependent_means(graph, sizes_differ=False))]
    if not nodes:
        return []
    shown = [f"{node.name} ({node.line.rsplit('/', 1)[-1]})" for node in nodes]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return [f"means weighted by counts of the full batch, not of its microbatches: {', '.join(shown[:3])}{more}"]


def _units(assignment: Assignment, stage: int) -> str:
    nodes = [node for node, s in zip(assignment.graph.nodes, assignment.node_stage, strict=True) if s == stage]
    units = list(dict.fromkeys(node.unit for node in nodes if node.unit is not None))
    if not units:
        return "(glue)"
    return units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]} ({len(units)})"


def value_bytes(graph: StepGraph, index: int) -> int:
    """Return the bytes of one value of a step."""
    value = graph.values[index]
    return math.prod(value.shape) * _SIZES.get(value.dtype, 2)


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
