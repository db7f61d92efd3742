"""The table that is printed when a run starts, or its layout has changed."""

from __future__ import annotations

from lightning_hybrid.strategies.run.module_partition import ModulePartition
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.start.layout_table import describe
from lightning_hybrid.strategies.techniques.recomputation import describe_policies
from lightning_hybrid.strategies.techniques.tensor_parallel import describe_tensor_plans
from lightning_hybrid.strategies.techniques.zero import describe_manual_zero, describe_zero


def describe_run(run: Run, partition: ModulePartition | None) -> str:
    """Return the start table: sizes, stages, messages, and what each technique found."""
    setting = run.setting
    options, layout = setting.options, setting.layout
    first = run.plan.first.assignment if run.plan is not None and run.plan.first is not None else None
    means = run.is_pipelined and options.microbatch_weight is None and options.microbatches != 1
    lines = [describe(layout, first, options.schedule, means=means)]
    if run.demotion is not None:
        lines.append(run.demotion.line)
    if run.shards is not None and partition is not None:
        lines.append(describe_tensor_plans(run.shards.plans, partition.plan_summary))
    if partition is not None and partition.expert_summary:
        lines.append(partition.expert_summary)
    if run.zero is not None:
        lines.append(describe_zero(run.zero_stage, run.mesh.size("dp_shard"), per_layer=run.zero.per_layer))
    if setting.shards_manual_steps:
        lines.append(describe_manual_zero(options.zero_stage, layout.data_shard_size))
    if options.offloaded:
        stores = (f"{what.replace('_', ' ')} {where}" for what, where in options.offloaded.items())
        lines.append(f"at rest: {', '.join(stores)}")
    if run.recomputation is not None:
        lines.append(describe_policies(run.recomputation.policies, setting.recompute))
    if run.compiled is not None:
        lines += run.compiled.lines()
    return "\n".join(lines)
