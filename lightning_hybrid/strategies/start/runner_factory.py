"""The factory of step runners: with stages or without, as the user's options say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.local_shards import LocalShards
from lightning_hybrid.pipeline.microbatch_runner import MicrobatchRunner
from lightning_hybrid.pipeline.plain_runner import PlainRunner
from lightning_hybrid.pipeline.results.metric_sync import MetricSync
from lightning_hybrid.pipeline.runner import StepRunner
from lightning_hybrid.pipeline.runtime.transport import transport_of
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.unpartitioned_steps import UnpartitionedSteps
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.strategies.options.strategy_options import Options
from lightning_hybrid.verify.copy_memory import free_bytes

# Parameters that are lent may take this share of the memory that is free when a step begins.
_SHARE = 0.25


def runner_of_stages(
    module: nn.Module,
    mesh: Mesh,
    shares: dist.ProcessGroup,
    options: Options,
    randomness: KeyedRandomness,
    *,
    replica: int,
    metrics: MetricSync,
    parts: Callable[[], LocalShards | None],
    agree: Callable[[Any], Any],
    num_processes: int,
    around_unpartitioned: Callable[[], AbstractContextManager[None]],
) -> tuple[StagePlan, MicrobatchRunner]:
    """Plan the stages of a module, and be ready to run its steps on them.

    Args:
        module: The user's, whole.
        mesh: The ranks.
        shares: Those that share the batches of a replica, where they hold shards and no stages.
        options: What was asked for.
        randomness: Keys what steps draw.
        replica: Which one this rank is of.
        metrics: Of the module.
        parts: What this rank holds of each parameter, later.
        agree: Returns the first rank's argument on every rank.
        num_processes: On this node.
        around_unpartitioned: Entered around steps of evaluation that are not cut.
    """
    pipeline, device = mesh.group("pp"), randomness.device
    # Several stages of one rank would compute what one does.
    each, cuts = (options.stages_per_rank, options.pipeline_cuts) if pipeline.size() > 1 else (1, None)
    plan = StagePlan(module, pipeline, randomness, stages_per_rank=each, cuts=cuts, agree=agree)
    unpartitioned = UnpartitionedSteps(
        module,
        plan,
        parts,
        mesh.group("replica"),
        randomness,
        room=partial(_room_to_lend, device, num_processes),
        tell=_warn_of_unpartitioned,
        around=around_unpartitioned,
    )
    common: dict[str, Any] = {
        "num_microbatches": options.microbatches,
        "splitter": options.batch_splitter,
        "replica": replica,
        "metrics": metrics,
        "unpartitioned": unpartitioned,
    }
    if pipeline.size() == 1:
        everyone = mesh.group("data")
        runner = PlainRunner(
            module,
            plan,
            randomness,
            shares=shares,
            everyone=everyone,
            tell=rank_zero_warn,
            inform=rank_zero_info,
            **common,
        )
        return plan, runner
    transport = transport_of(pipeline, device)
    tell = partial(_tell_at_once, pipeline.size(), options.strict_layout)
    further: dict[str, Any] = {"schedule": options.schedule, "warn_unsplit": tell}
    return plan, StepRunner(module, plan, transport, pipeline, randomness, **further, **common)


def _room_to_lend(device: torch.device, num_processes: int) -> int:
    """Bytes that parameters of other ranks may take on this rank during a step; processes share a host's memory."""
    return int(min(_SHARE * free_bytes(device) / num_processes, 2.0**62))


def _tell_at_once(num_ranks: int, is_strict: bool, name: str, reason: str) -> None:
    """Say that the batches of a training step are not split; evaluation loses nothing that matters.

    Raises:
        StepError: The user wants the layout or nothing.
    """
    if name != "training_step":
        return
    told = f"{reason}: what that is for the whole batch cannot be told from microbatches"
    if is_strict:
        raise StepError(told)
    rank_zero_warn(
        f"{told}. So each batch is one microbatch, and the {num_ranks} pipeline ranks work one after the other. Rows of"
        " samples and means over samples that a step appends to a list of its module, or logs, can be told"
    )


def _warn_of_unpartitioned(name: str, reason: Exception) -> None:
    rank_zero_warn(
        f"{name} cannot be shared by stages, so every rank runs all of it, and is sent parameters of other ranks when"
        f" it reads them: the numbers of one process, in the time of one process. The reason: {reason}"
    )
