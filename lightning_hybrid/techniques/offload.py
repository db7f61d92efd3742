"""Parameters, gradients and states of optimizers that are on the host or in a file between their uses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.errors import PrecisionError, QuantizedStatesError
from lightning_hybrid.optimizers.full_step import AllParametersStep
from lightning_hybrid.optimizers.layer_step import LayerwiseStep
from lightning_hybrid.optimizers.moved import MovedStates
from lightning_hybrid.optimizers.trial import has_low_bit_states, why_not_layerwise
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.predict.ranks import Place, places_of
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.techniques.fused_adam import fuse_steps
from lightning_hybrid.techniques.technique import Technique
from lightning_hybrid.zero.storage import StorageDevices


class Offload(Technique):
    """The user's ``offload``: states are stepped layer by layer; ZeRO moves shards of parameters and gradients.

    Attributes:
        where: "cpu" or "disk:PATH" by kind: "parameters", "gradients", "optimizer_states".
    """

    def __init__(self, where: Mapping[str, str]) -> None:
        self.where = where

    def places(self, run: Any) -> dict[str, Place]:
        """Return where each kind is, unless the host is the compute device."""
        places = places_of(self.where).items()
        return {what: place for what, place in places if place == "files" or run.setting.device.type != "cpu"}

    def lines(self, run: Any) -> list[str]:
        """Return the places, and that the host of a device that is the host is none."""
        stores = (f"{what.replace('_', ' ')} {where}" for what, where in self.where.items())
        lines = [f"offloaded: {', '.join(stores)}"]
        if run.setting.device.type == "cpu" and "cpu" in self.where.values():
            lines.append("offload: 'cpu' changes no memory on a CPU device; 'disk:PATH' does")
        return lines

    def check_optimizers(self, run: Any, optimizers: Sequence[Optimizer]) -> None:
        """Refuse states and steps that cannot be moved.

        Raises:
            QuantizedStatesError: States have few bits.
            PrecisionError: Parameters are rounded at random, by the places of their elements.
        """
        for optimizer in optimizers:
            if has_low_bit_states(optimizer):
                raise QuantizedStatesError(
                    f"offload={run.setting.options.offload!r} moves the states of {type(optimizer).__name__} between"
                    " devices, but they are quantized; leave offload out, or use torch.optim.AdamW",
                    entry="quantized-offload",
                )
        device, rounds = run.setting.device, getattr(run.setting.precision, "stochastic_rounding", False)
        if rounds and "optimizer_states" in self.where and device.type != "cpu":
            raise PrecisionError(
                f"stochastic_rounding=True: offload of optimizer states from {device} steps copies of parameters, which"
                " do not know the places of their elements; leave out the offload, or set master_weights=True instead",
                entry="precision-rounding-places",
            )

    def move_states(
        self, run: Any, optimizers: Sequence[Optimizer], watched: Sequence[Optimizer]
    ) -> Sequence[MovedStates]:
        """Step layer by layer; optimizers that are watched, since they may combine parameters, with all states."""
        setting, precision = run.setting, run.setting.precision
        float32 = isinstance(precision, HybridPrecision) and precision.steps_in_float32
        layers = parameters_by_layer(setting.module, run.plan)
        made = offload_states(
            optimizers,
            layers,
            self.where,
            setting.device,
            watched,
            run.until_end,
            run.active.regions,
            in_float32=float32,
        )
        on_host = [each.host_optimizer for each in made if isinstance(each, LayerwiseStep) and each.host_optimizer]
        if float32 and on_host:  # copies of the optimizers step copies of the parameters
            run.until_end.callback(setting.mesh_precision.step_in_float32(on_host, {}, step=lambda: 0))
        return made


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
) -> list[MovedStates]:
    """Step layer by layer, if states are offloaded to the host or a file.

    ``watched`` are optimizers that may combine all parameters in their step; ``regions`` are the parts of files in
    which parameters are; ``in_float32`` tells that bfloat16 parameters are stepped in float32, so that their states
    have another dtype than they.
    """
    devices, where = StorageDevices.of(offload, device), offload.get("optimizer_states")
    if where is None and not regions and devices.between_steps == devices.states:
        return []
    folder = None if where is None or where == "cpu" else where.removeprefix("disk:")
    offloaded: list[MovedStates] = []
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
