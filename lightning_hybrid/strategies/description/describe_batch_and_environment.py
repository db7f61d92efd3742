"""Lines of the start of a run on its batches, its parameters, its memory and its environment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.memory.estimate_rank_memory import RankMemory
from lightning_hybrid.schedule import Portals, make_schedule, simulate
from lightning_hybrid.step.standins.absent_tensors import full_shape
from lightning_hybrid.strategies.run.plan_stages_shards_and_layers import RecordedBatch
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.run.run_objects_and_options import Setting
from lightning_hybrid.version import __version__

_CUDA = (
    "CUDA: all tests have run on CPU processes; several GPUs, NCCL and several machines have not been tried. Run"
    " `python -m pytest -m gpu -n 0 tests/gpu` first; verify_first_step=True compares the first step with one process"
)


def describe_batch(run: Run, batch: RecordedBatch | None, assignment: Assignment | None) -> str:
    """Return the line on the batches of an optimizer step, with the bubble that the schedule predicts.

    Args:
        run: The run.
        batch: With which the step was recorded; None if it was not.
        assignment: Of the recorded step to stages; None without stages.
    """
    setting = run.setting
    replicas, accumulated = setting.layout.data_parallel_size, setting.trainer.accumulate_grad_batches
    factors = [f"{replicas} replica{'s' * (replicas != 1)}"]
    factors += [f"{accumulated} accumulated batches"] if accumulated > 1 else []
    if batch is None:
        count = setting.options.microbatches or 1
        factors.append("each batch of its loader" if count == 1 else f"{count} microbatches of each batch")
        return f"batch: {' x '.join(factors)}"
    count = batch.num_microbatches
    factors.append(f"{count} microbatch{'es' * (count != 1)}")
    line = f"batch: {' x '.join(factors)} of unknown size"
    if batch.samples is not None:
        size = math.ceil(batch.samples / count)
        about = "" if size * count == batch.samples else "up to "
        total = batch.samples * replicas * accumulated
        line = f"batch: {total} samples = {' x '.join(factors)} of {about}{size}"
    if assignment is None:
        return line
    return f"{line}; predicted bubble {100 * predicted_bubble(run, assignment, count):.0f} %"


def predicted_bubble(run: Run, assignment: Assignment, num_microbatches: int) -> float:
    """Return the idle share of rank-time in the simulated schedule; a backward is taken to cost two forwards."""
    assert run.plan is not None
    options, plan = run.setting.options, run.plan
    schedule = make_schedule(options.schedule, plan.num_ranks, num_microbatches, plan.stages_per_rank)
    portals = Portals(frozenset(assignment.portals), frozenset(assignment.gradient_portals()))
    costs = assignment.costs()
    return simulate(schedule, portals, forward_seconds=costs, backward_seconds=[2 * cost for cost in costs]).bubble


def describe_parameters(setting: Setting) -> str:
    """Return the line on the numbers of trained and frozen parameters."""
    numbers = {True: 0, False: 0}
    for parameter in setting.module.parameters():
        numbers[parameter.requires_grad] += math.prod(full_shape(parameter))
    return f"parameters: {numbers[True]:,} trained, {numbers[False]:,} frozen"


def describe_memory(ranks: Sequence[RankMemory], *, is_upper_bound: bool) -> str:
    """Return the line on the estimated memory of the rank with the most.

    Args:
        ranks: The memory of each pipeline rank.
        is_upper_bound: Whether tensor or context ranks shard activations, which are estimated unsharded.
    """
    most = max(ranks, key=lambda memory: memory.total)
    sizes = {
        "parameters": most.parameters,
        "gradients": most.gradients,
        "optimizer states": most.optimizer_states,
        "activations in flight": most.activations,
    }
    if most.gathered:
        sizes["gathered by ZeRO"] = most.gathered
    terms = [f"{format_bytes(size)} {kind}" for kind, size in sizes.items() if size is not None]
    unknown = [f"unknown {kind}" for kind, size in sizes.items() if size is None]
    limit = "up to " if len(ranks) > 1 or (is_upper_bound and most.activations is not None) else ""
    return f"estimated memory per rank: {limit}{format_bytes(most.total)} = {' + '.join([*terms, *unknown])}"


def describe_environment(setting: Setting) -> list[str]:
    """Return the lines on the nodes, the precision, the backend and the version; and on CUDA what is untried there."""
    world = setting.world
    where = "1 node" if world.num_nodes == 1 else f"each of {world.num_nodes} nodes"
    backend = dist.get_backend() if dist.is_initialized() else "none"
    ranks = f"{world.num_processes} rank{'s' * (world.num_processes != 1)} on {where}"
    line = (
        f"environment: {ranks}, precision {setting.precision.precision}, backend {backend}, lightning-hybrid"
        f" {__version__}, torch {torch.__version__}"
    )
    return [line, _CUDA] if setting.device.type == "cuda" else [line]


def format_bytes(count: float) -> str:
    """Return a number of bytes with three digits and its unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
