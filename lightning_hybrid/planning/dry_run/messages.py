"""The messages that one rank sends in a training step, from its plan: between stages, and of gradients over replicas.

Counted are tensors of the model: values and gradients between stages, averages of gradients, gathers of parameters.
Small messages are not: flags on which ranks agree, logged numbers, and the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.pipeline.runtime.gradients import in_messages
from lightning_hybrid.precision.message_dtypes import message_dtypes
from lightning_hybrid.run.run import Run
from lightning_hybrid.schedule.actions import Portals
from lightning_hybrid.schedule.program import Program, Send, lower
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.techniques.reducers import stage_of_gradient
from lightning_hybrid.techniques.technique import Messages

_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # defaults of GradientReducer


def program_of(run: Run, num_microbatches: int) -> Program | None:
    """Return the program of all pipeline ranks; None without stages."""
    if run.assignment is None or run.plan is None:
        return None
    return lower(run.plan.training_schedule(num_microbatches), Portals.of(run.assignment))


def pipeline_messages(run: Run, program: Program | None) -> list[Messages]:
    """Return what a rank sends to other stages: one message for each tensor and microbatch."""
    if program is None:
        return []
    assignment = run.assignment
    assert run.plan is not None and assignment is not None
    portals = {"forward": assignment.portals, "backward": assignment.gradient_portals()}
    totals: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    for instruction in program.instructions[run.plan.rank]:
        if isinstance(instruction, Send):
            message = instruction.message
            stages = message.source, message.target
            values = portals[message.direction][stages if message.direction == "forward" else stages[::-1]]
            key = message.direction, message.target
            totals[key] += sum(assignment.graph.values[value].nbytes for value in values)
            counts[key] += len(values)
    names = {"forward": "values", "backward": "gradients"}
    return [
        Messages("pipeline", f"{names[direction]} to stage {target}", "send", 2, counts[direction, target], nbytes)
        for (direction, target), nbytes in totals.items()
    ]


def bytes_of_casts(run: Run) -> int:
    """Return the bytes of the copies of gradients that are averaged in another dtype, where ZeRO does not."""
    dtype = message_dtypes(run.setting.precision)["reduce_dtype"]
    if dtype is None or any(technique.shardings for technique in run.techniques) or run.mesh.size("data") == 1:
        return 0
    return sum(
        torch.Size(shape).numel() * dtype.itemsize
        for _, parameter, shape in _local(run)
        if parameter.requires_grad and run.setting.dtype_of_gradient(parameter) != dtype
    )


def gradient_messages(run: Run, num_microbatches: int) -> list[Messages]:
    """Return the averages of gradients over replicas, the gathers of ZeRO, and the sums over stages."""
    sent = [each for technique in run.techniques for each in technique.messages(run, num_microbatches)]
    averages = [] if any(technique.shardings for technique in run.techniques) else [*_average_messages(run)]
    return [*averages, *sent, *_tied_messages(run)]


def local_names(run: Run) -> list[str]:
    """Return the FQNs of the parameters of this rank's stages."""
    plan = run.plan
    names = [name for name, _ in run.setting.module.named_parameters()]
    if plan is None or not run.is_pipelined or not plan.is_partitioned:
        return names
    return [name for name in names if plan.rank in plan.ranks_of(name)]


def _local(run: Run) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the FQN, the parameter and the shape of the local shard."""
    shardings = run.parts.shardings
    parameters = dict(run.setting.module.named_parameters())
    for name in local_names(run):
        yield name, parameters[name], shard_of(shardings, name, full_shape(parameters[name])).shape


def _average_messages(run: Run) -> Iterator[Messages]:
    mesh, plan = run.mesh, run.plan
    divided, sharded = run.names_over("ep"), run.parts.names
    reducers: dict[tuple[str, Any], list[tuple[torch.dtype, int, Any]]] = {}
    for name, parameter, shape in _local(run):
        if not parameter.requires_grad:
            continue
        stage: int | None = None
        ranks: tuple[int, ...] = (0,)
        if plan is not None and plan.is_partitioned:
            stage, ranks = stage_of_gradient(plan, name), plan.ranks_of(name)
        copies = mesh.size("data") > 2 and (len(ranks) > 1 or (mesh.size("tp") > 1 and name not in sharded))
        group = "ep_replicate" if name in divided else "data"
        numel = torch.Size(shape).numel()
        reducers.setdefault((group, stage), []).append(
            (parameter.dtype, numel, (ranks, name not in sharded) if copies else None)
        )
    dtype = message_dtypes(run.setting.precision)["reduce_dtype"]
    for axis in ("data", "ep_replicate"):
        buckets = [
            each for (group, _), members in reducers.items() if group == axis for each in _buckets(members, dtype)
        ]
        if buckets and mesh.size(axis) > 1:
            yield Messages("data", "averages of gradients", "all_reduce", mesh.size(axis), len(buckets), sum(buckets))


def _buckets(members: Sequence[tuple[torch.dtype, int, Any]], dtype: torch.dtype | None) -> list[int]:
    """Return the bytes of each message of a `GradientReducer`, with its flags."""
    closed: list[int] = []
    opened: dict[Any, tuple[int, int, int]] = {}  # parameters, elements, bytes of gradients

    def close(key: Any) -> None:
        count, numel, _ = opened.pop(key)
        closed.append((numel + count + 1) * (dtype or key[0]).itemsize)

    for each_dtype, numel, copies in reversed(members):
        key = each_dtype, copies
        count, elements, nbytes = opened.get(key, (0, 0, 0))
        opened[key] = count + 1, elements + numel, nbytes + numel * each_dtype.itemsize
        if opened[key][2] >= (_FIRST_BUCKET_BYTES if not closed and copies is None else _BUCKET_BYTES):
            close(key)
    for key in list(opened):
        close(key)
    return closed


def _tied_messages(run: Run) -> Iterator[Messages]:
    """Yield the gradients of parameters of several stages, which their ranks send to each other."""
    plan = run.plan
    if plan is None or not run.is_pipelined or not plan.is_partitioned:
        return
    sets: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
    for name, parameter, shape in _local(run):
        ranks = tuple(sorted(set(plan.ranks_of(name))))
        if len(ranks) > 1:
            sets.setdefault((ranks, run.setting.dtype_of_gradient(parameter)), []).append(torch.Size(shape).numel())
    for (ranks, dtype), together in sets.items():
        others = len(ranks) - 1
        for numels in in_messages(together, together):
            nbytes = (sum(numels) + len(numels)) * dtype.itemsize
            # Of more than two ranks each sums a piece, and sends it to the others.
            count, sent = (1, nbytes) if others == 1 else (2 * others, 2 * others * nbytes // len(ranks))
            yield Messages("pipeline", "gradients of shared parameters", "send", 2, count, sent)


def sent_by_axis(messages: Iterable[Messages]) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by axis."""
    totals: dict[str, float] = {}
    for each in messages:
        totals[each.axis] = totals.get(each.axis, 0.0) + each.sent_bytes
    return {axis: round(total) for axis, total in totals.items()}
