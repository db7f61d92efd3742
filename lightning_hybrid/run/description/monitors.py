"""What the plan of a run tells the monitors among the Trainer's callbacks: FLOPs of a step, predicted memory."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.run.description.memory import memory_of_ranks, memory_of_stages
from lightning_hybrid.run.run import Run
from lightning_hybrid.soft_failures import only_informs


def connect_monitors(run: Run, graph: StepGraph | None) -> None:
    """Tell the monitors of the Trainer what the plan of a run says; layers may be planned by a ``graph``."""
    trainer: Any = run.setting.trainer
    if run.assignment is not None:
        graph = run.assignment.graph
    for callback in trainer.callbacks if run.setting.is_fitting else ():
        if hasattr(callback, "connect_flops"):
            with only_informs("the FLOPs of a step"):
                callback.connect_flops(*_flops_per_sample(run, graph))
        if hasattr(callback, "connect_prediction"):
            with only_informs("the estimated memory of a rank"):
                saved = {} if graph is None else _saved_bytes(graph)
                callback.connect_prediction(_memory_of_rank(run), saved)


def _flops_per_sample(run: Run, graph: StepGraph | None) -> tuple[float | None, str]:
    """FLOPs of the recorded training step for one sample; or None, and why they cannot be counted in a step either."""
    layout = run.setting.layout
    is_sharded = layout.shards_layers or layout.joins_replicas
    if run.fallback is not None:  # a rank runs full batches, or shares, some of them twice
        return None, "ranks hold shards instead of stages, and the training step could not be recorded"
    if not run.is_pipelined and not is_sharded:
        return None, ""  # a rank runs the batch in full layers
    batch = run.batch
    if graph is None:
        return None, "layers are sharded, and the training step could not be recorded"
    if batch is None or not batch.samples:
        return None, "the batch that the step was recorded with has no number of samples"
    return sum(node.step_flops for node in graph.nodes) * batch.num_microbatches / batch.samples, ""


def _memory_of_rank(run: Run) -> RankMemory:
    batch = run.batch
    optimizers = run.setting.trainer.optimizers
    stages = memory_of_stages(run, optimizers, 1 if batch is None else batch.num_microbatches)
    return memory_of_ranks(stages, run)[run.mesh.rank_in("pp") if run.is_pipelined else 0]


def _saved_bytes(graph: StepGraph) -> dict[str, int]:
    """Bytes that each layer, or the code outside of layers, saves for the backward of one microbatch."""
    saved: dict[str, int] = {}
    for node in graph.nodes:
        name = node.unit or "operations outside of layers"
        values = sum(graph.values[index].nbytes for index in node.saved_values)
        saved[name] = saved.get(name, 0) + node.saved_bytes + values
    return saved
