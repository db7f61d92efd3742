"""Optimizer states that are offloaded to the host or a file between steps, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.optimizers.full_step import AllParametersStep
from lightning_hybrid.optimizers.layer_step import LayerwiseStep
from lightning_hybrid.optimizers.offloaded import OffloadedStates
from lightning_hybrid.optimizers.trial import why_not_layerwise
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.techniques.fused_adam import fuse_steps
from lightning_hybrid.zero.storage import StorageDevices


def parameters_by_layer(module: nn.Module, plan: StagePlan | None) -> list[list[nn.Parameter]]:
    """Return all parameters, layer by layer; first those outside of layers."""
    units = dict(module.named_children()) if plan is None else choose_units(module, 1)
    if plan is not None and plan.num_ranks > 1 and plan.first is not None:
        units = dict(plan.first.recording.units)
    members = [list(layer.parameters()) for layer in find_layers(units).values()]
    covered: set[int] = set()
    distinct = []
    for layer in members:
        distinct.append([p for p in layer if id(p) not in covered])
        covered.update(map(id, layer))
    return [[p for p in module.parameters() if id(p) not in covered], *distinct]


def offload_states(
    optimizers: Sequence[Optimizer],
    layers: Sequence[Sequence[nn.Parameter]],
    offload: Mapping[str, str],
    device: torch.device,
    watched: Sequence[Optimizer],
    until: contextlib.ExitStack,
    regions: Mapping[int, Any],
    *,
    in_float32: bool = False,
) -> list[OffloadedStates]:
    """Step layer by layer, if states are offloaded to the host or a file.

    ``watched`` are optimizers that may combine all parameters in their step; ``regions`` are the parts of files in
    which parameters are; ``in_float32`` tells that bfloat16 parameters are stepped in float32, so that their states
    have another dtype than they.
    """
    devices, where = StorageDevices.of(offload, device), offload.get("optimizer_states")
    if where is None and not regions and devices.between_steps == devices.states:
        return []
    folder = None if where is None or where == "cpu" else where.removeprefix("disk:")
    offloaded: list[OffloadedStates] = []
    for optimizer in optimizers:
        sees_all = any(other is optimizer for other in watched)
        why = "may read all of the model" if sees_all else why_not_layerwise(optimizer, in_file=folder is not None)
        if in_float32 and folder is not None:  # a file has room for states of the parameters' dtype
            why = why or "steps bfloat16 parameters in float32"
        if not why:
            step = LayerwiseStep(optimizer, layers, folder, regions, states_on=devices.states)
            fuse_steps([] if step.host_optimizer is None else [step.host_optimizer], until)
            offloaded.append(step)
        else:
            name = type(optimizer).__name__
            rank_zero_info(f"offload: {name} {why}, so all of its states are in memory during its step")
            offloaded.append(AllParametersStep(optimizer, folder, regions.values(), states_on=devices.states))
        until.callback(offloaded[-1].close)
    return offloaded
