"""The factory of step runners: with stages or without, by the user's options."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.errors import StepError
from lightning_hybrid.memory.free import free_bytes
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.metrics import MetricSync
from lightning_hybrid.pipeline.plain import PlainRunner
from lightning_hybrid.pipeline.runner import MicrobatchRunner
from lightning_hybrid.pipeline.runtime.transport import transport_of
from lightning_hybrid.pipeline.staged import StepRunner
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.pipeline.unpartitioned import UnpartitionedSteps
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.setting import Setting

# Share of the memory free at the start of a step that gathered parameters may take.
_FREE_MEMORY_SHARE = 0.25


def make_runner(
    setting: Setting, mesh: Mesh, randomness: KeyedRandomness, metrics: MetricSync, holder: Any
) -> tuple[StagePlan, MicrobatchRunner]:
    """Make the stage plan of a full module, and the runner of its steps; ``holder`` has the run, with its shards."""
    module, world, options = setting.module, setting.world, setting.options
    pipeline, device = mesh.group("pp"), randomness.device
    # Several stages of one rank would compute what one does.
    each, cuts = (options.stages_of_each_rank, options.pipeline_cuts) if pipeline.size() > 1 else (1, None)
    plan = StagePlan(
        module,
        pipeline,
        randomness,
        schedule=options.schedule,
        stages_per_rank=each,
        max_microbatches_in_flight=options.max_microbatches_in_flight,
        cuts=cuts,
        widths=(pipeline.size() > 1 and options.stage_widths) or (),
        closes_mixtures=mesh.layout.joins_replicas,
        agree=world.broadcast,
        first_failure=world.first_failure,
    )
    unpartitioned = UnpartitionedSteps(
        module,
        plan,
        lambda: holder.run.parts,
        mesh.group("replica"),
        randomness,
        partial(world.rendezvous, compares=False),
        room=partial(_gather_budget, device, world.num_processes),
        warn=_warn_of_unpartitioned,
        has_recorded=world.progress.has_recorded,
        fails_alone=world.progress.fails_alone,
    )
    common: dict[str, Any] = {
        "num_microbatches": options.microbatches,
        "splitter": options.batch_splitter,
        "replica": world.data_rank,
        "warn": rank_zero_warn,
    }
    if pipeline.size() == 1:
        shares, everyone = mesh.group("shares" if mesh.sharded_axes else "pp"), mesh.group("data")
        common |= {"shares": shares, "everyone": everyone, "replica_size": world.mesh.size("replica")}
        common["inform"] = rank_zero_info
        return plan, PlainRunner(plan, metrics, unpartitioned, **common)
    warn = partial(_warn_unsplit, pipeline.size(), options.strict_layout)
    common |= {"transport": transport_of(pipeline, device), "warn_unsplit": warn}
    return plan, StepRunner(plan, metrics, unpartitioned, **common)


def _gather_budget(device: torch.device, num_processes: int) -> int:
    """Bytes that gathered parameters may take on this rank during a step; processes share a host's memory."""
    return int(min(_FREE_MEMORY_SHARE * free_bytes(device) / num_processes, 2.0**62))


def _warn_unsplit(num_ranks: int, is_strict: bool, name: str, reason: str) -> None:
    """Warn that the batches of a training step are not split (in evaluation that costs little), or raise if strict."""
    if name != "training_step":
        return
    message = f"{reason}: its value for the full batch cannot be computed from microbatches"
    if is_strict:
        raise StepError(
            f"{message}; append it to a list of the module, or set num_microbatches=1, or strict_layout=False, which"
            " warns and runs such batches as one microbatch each",
            entry="kept-value",
        )
    rank_zero_warn(
        f"{message}. So each batch is one microbatch, and the {num_ranks} pipeline ranks work one after the other."
        " Rows of samples and means over samples that a step appends to a list of its module, or logs, can be computed"
        " (lightning-hybrid explain-error batch-unsplit)"
    )


def _warn_of_unpartitioned(name: str, reason: Exception) -> None:
    cause = re.split(r"; |, which ", str(reason), maxsplit=1)[0]  # without advice for training
    rank_zero_warn(
        f"{name} runs unpartitioned on every rank, as in one process: {cause}"
        " (lightning-hybrid explain-error unpartitioned)"
    )
