"""Lines of the start of a run on its batches, its parameters, its memory and its environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.predict.ranks import Place, RankMemory
from lightning_hybrid.run.run import Run
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.schedule import Portals, simulate
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.text import counted, sized, spanned_names
from lightning_hybrid.version import __version__

if TYPE_CHECKING:
    from lightning_hybrid.run.partition import RecordedBatch


# FLOPs that take a core the 50 µs in which a stage starts an operation.
_SHORT = 5e6
_CUDA = (
    "CUDA: the tests of one GPU have passed; several GPUs, NCCL between ranks and several machines have not been"
    " tried. Run `python -m pytest -m gpu -n 0 tests/gpu` first; verify_first_step=True compares the first step with"
    " one process"
)


def describe_batch(run: Run, batch: RecordedBatch | None, assignment: Assignment | None) -> str:
    """Return the line on the batches of an optimizer step, with the bubble that the schedule predicts for stages."""
    setting = run.setting
    replicas, accumulated = setting.layout.data_parallel_size, setting.trainer.accumulate_grad_batches
    factors = [counted(replicas, "replica")]
    factors += [f"{accumulated} accumulated batches"] if accumulated > 1 else []
    if batch is None:
        size, count = _batch_size_of_loader(setting.trainer), setting.options.microbatches or 1
        if size is None and count > 1:
            return f"batch: {' x '.join([*factors, f'{count} microbatches of each batch'])}"
        if size is None:
            own = "each with its own batches" if replicas > 1 else "batches of unknown size"
            return f"batch: {' x '.join(factors)}, {own}"
        if count == 1:
            of = "of" if accumulated > 1 else "x"
            return f"batch: {size * replicas * accumulated} samples = {' x '.join(factors)} {of} {size}"
        from lightning_hybrid.run.partition import RecordedBatch

        batch = RecordedBatch(size, min(count, size))
    count = batch.num_microbatches
    factors.append(counted(count, "microbatch"))
    line = f"batch: {' x '.join(factors)} of unknown size"
    if batch.samples is not None:
        size = math.ceil(batch.samples / count)
        about = "" if size * count == batch.samples else "up to "
        even = max(n for n in range(1, count + 1) if batch.samples % n == 0)
        total = batch.samples * replicas * accumulated
        line = f"batch: {total} samples = {' x '.join(factors)} of {about}{size}"
        line += f" (num_microbatches={even} makes them equal)" if about and even > 1 else ""
    if assignment is None:
        return line
    return f"{line}; predicted bubble {100 * predicted_bubble(run, assignment, count):.0f} %"


def describe_overhead(run: Run, batch: RecordedBatch | None, assignment: Assignment | None) -> list[str]:
    """Return the line on microbatches whose operations take less time than Python does to start them."""
    if assignment is None or batch is None or batch.samples is None or run.setting.options.microbatches is not None:
        return []
    counts = range(run.setting.layout.pipeline_parallel_size, batch.num_microbatches)
    fewer = next((count for count in counts if batch.samples % count == 0), None)
    if fewer is None or sum(assignment.costs()) > _SHORT * len(assignment.graph.nodes):
        return []
    return [
        f"microbatches are small: an operation takes less time than its start, so num_microbatches={fewer}, of"
        f" {counted(batch.samples // fewer, 'sample')} each, may be faster, and larger batches are"
    ]


def knows_batches(run: Run) -> bool:
    """Whether the size of batches is known, or will not be: the Trainer asks hooks for loaders after the start."""
    return run.batch is not None or _batch_size_of_loader(run.setting.trainer) is not None


def _batch_size_of_loader(trainer: Any) -> int | None:
    """Return the batch size of the loader that the user has passed to ``fit``; None if it is made later, or unknown."""
    source = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
    loader = trainer.train_dataloader if trainer.fit_loop._combined_loader is not None else source
    size = getattr(loader, "batch_size", None) if isinstance(loader, DataLoader) else None
    return size if isinstance(size, int) else None


def describe_batch_norm(setting: Setting, batch: RecordedBatch | None) -> list[str]:
    """Return the line on BatchNorm layers whose statistics are of fewer samples than a batch has; none otherwise."""
    layers = sum(isinstance(module, _BatchNorm) for module in setting.module.modules())
    if not layers or batch is None or batch.samples is None or batch.num_microbatches == 1:
        return []
    replicas = setting.layout.data_parallel_size
    is_synced = replicas > 1 and getattr(setting.trainer.strategy, "_layer_sync", None) is not None
    samples = batch.samples * (replicas if is_synced else 1)
    size = math.ceil(samples / batch.num_microbatches)
    counts = dict.fromkeys([max(1, batch.num_microbatches // 2), max(1, batch.num_microbatches // 4)])
    gives = [f"{count} gives {math.ceil(samples / count)}" for count in counts]
    advice = f"num_microbatches={', '.join(gives)}"
    advice += " (larger bubble)" * (setting.layout.pipeline_parallel_size > 1)
    if replicas > 1 and not is_synced:
        advice += "; Trainer(sync_batchnorm=True) adds those of the other replicas"
    return [
        f"BatchNorm: {counted(layers, 'layer')} average{'s' * (layers == 1)} {size} samples (a microbatch"
        f"{' of all replicas' * is_synced}), and {samples} in one process, which may change the accuracy; {advice}"
    ]


def describe_embeddings(setting: Setting) -> list[str]:
    """Return the lines on embeddings that count or rescale the words of each replica's batch."""
    words = {n: m for n, m in setting.module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    counts = [name for name, module in words.items() if module.scale_grad_by_freq]
    rescales = [name for name, module in words.items() if module.max_norm is not None]
    count = setting.layout.data_parallel_size
    of_replicas = {
        f"scale_grad_by_freq=True counts the words of a replica's batch, not of all {count}": counts,
        f"max_norm rescales rows on the replica that looks them up: the weights of {count} replicas differ, as under"
        " DDP": rescales,
    }
    return [f"{name}: {text}" for text, names in of_replicas.items() for name in names if count > 1]


def predicted_bubble(run: Run, assignment: Assignment, num_microbatches: int) -> float:
    """Return the idle share of rank-time in the simulated schedule; a backward is taken to cost two forwards."""
    assert run.plan is not None
    schedule = run.plan.training_schedule(num_microbatches)
    portals = Portals.of(assignment)
    costs = assignment.costs()
    return simulate(schedule, portals, forward_seconds=costs, backward_seconds=[2 * cost for cost in costs]).bubble


def describe_parameters(setting: Setting, graph: StepGraph | None) -> str:
    """Return the line on the numbers of trained and frozen parameters, and those that a recorded step does not use."""
    numbers = {True: 0, False: 0}
    for parameter in setting.module.parameters():
        numbers[parameter.requires_grad] += math.prod(full_shape(parameter))
    line = f"parameters: {numbers[True]:,} trained, {numbers[False]:,} frozen"
    if graph is None:
        return line
    used = {name for node in graph.nodes for name in node.parameters}
    trained = [name for name, parameter in setting.module.named_parameters() if parameter.requires_grad]
    unused = [name for name in trained if name not in used]
    return line + (f"; not used by the step: {spanned_names(unused)}" if unused else "")


def describe_memory(ranks: Sequence[RankMemory], *, is_upper_bound: bool) -> str:
    """Return the line on the estimated memory of the pipeline rank with the most.

    ``is_upper_bound``: tensor or context ranks shard activations, which are estimated unsharded.
    """
    most = max(ranks, key=lambda memory: memory.total)
    limit = "up to " if (len(ranks) > 1 or is_upper_bound) and most.activations is not None else ""
    held, activations = most.sizes_in(None), {}
    if most.activations is not None:
        activations = {"activations in flight": most.activations}
        activations |= {"working memory": working} if (working := most.working + most.messages) else {}
    if most.gathered:
        within = _sum_of_terms({"gathered by ZeRO": most.gathered, **activations})
        line = f"{limit}{sized(most.between_steps)} between steps{f' ({_sum_of_terms(held)})' if held else ''}"
        line += f", {limit}{sized(most.total)} within a step ({within})"
    else:
        line = f"{limit}{sized(most.total)}"
        line += f" = {_sum_of_terms({**held, **activations})}" if held or activations else ""
    places: tuple[tuple[Place, str], ...] = (("host", "on the host"), ("files", "in files"))
    for place, where in places:
        if sizes := most.sizes_in(place):
            known = sum(size or 0 for size in sizes.values())
            line += f"; {where} {sized(known)} ({_sum_of_terms(sizes)})"
    return f"estimated memory per rank: {line}" + ("" if activations else "; the first step measures activations")


def _sum_of_terms(sizes: Mapping[str, int | None]) -> str:
    """Return the sizes of several kinds, joined by plus signs; unknown ones come last."""
    names = {kind: kind.replace("_", " ") for kind in sizes}
    known = [f"{sized(size)} {names[kind]}" for kind, size in sizes.items() if size is not None]
    return " + ".join([*known, *(f"unknown {names[kind]}" for kind, size in sizes.items() if size is None)])


def describe_environment(setting: Setting) -> list[str]:
    """Return the lines on the nodes, the precision, the backend and the version; and on CUDA what is untried there."""
    world = setting.world
    where = "1 node" if world.num_nodes == 1 else f"each of {world.num_nodes} nodes"
    backend = dist.get_backend() if dist.is_initialized() else "none"
    ranks = f"{counted(world.num_processes, 'rank')} on {where}"
    precision = getattr(setting.precision, "description", setting.precision.precision)
    line = (
        f"environment: {ranks}, precision {precision}, backend {backend}, lightning-hybrid"
        f" {__version__}, torch {torch.__version__}"
    )
    return [line, _CUDA] if setting.device.type == "cuda" else [line]
