"""Offload and compression of saved activations: which layers, what share of each, and where to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.errors import ActivationError
from lightning_hybrid.memory.saved_activations.layer_activations import LayerActivations, Moving
from lightning_hybrid.memory.saved_activations.places import ActivationFile, HostMemory, InPlace
from lightning_hybrid.memory.saved_activations.requests import (
    DISK,
    Compression,
    Offload,
)
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.randomness.generators import mix
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.schedule.in_flight import microbatches_in_flight
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.tracing.compiled import compiled_modules
from lightning_hybrid.techniques.technique import Active, Technique


class StoredActivations(Technique):
    """The tensors that layers save for the backward are compressed, or moved to the host or a file until then."""

    def build(self, run: Any, owner: Any) -> Active:
        """Choose the layers of this rank, and what share of each is moved.

        Raises:
            ActivationError: The device is the host, or layers are compiled, or a name matches no layer.
        """
        self.storing = _stored(run)
        return _Storing(self.storing, run.runner)

    def lines(self, run: Any) -> list[str]:
        """Return what is stored where."""
        return [str(run.setting.saved_activations)]


class _Storing(Active):
    """The layers of this rank, while they run."""

    def __init__(self, layers: LayerActivations, runner: Any) -> None:
        self.layers, self._runner = layers, runner

    def running(self) -> AbstractContextManager[None]:
        """Store saved tensors of layers inside; none is rounded while results are compared."""
        return self.layers.running(is_exact=self._runner is not None and self._runner.is_comparing)


def _stored(run: Any) -> LayerActivations:
    setting = run.setting
    requests, module, plan = setting.saved_activations, setting.module, run.plan if run.is_pipelined else None
    device, is_compiled = setting.device, setting.options.compile is not None
    layers, stage_of, in_flight = dict(find_layers(dict(module.named_children()))), dict[str, int](), [1]
    all_layers = layers
    if plan is not None:
        all_layers, stage_of = _layers_of_stages(plan)
        layers = {fqn: layer for fqn, layer in all_layers.items() if stage_of[fqn] in plan.stages}
        count = 1 if run.batch is None else max(run.batch.num_microbatches, 1)
        in_flight = microbatches_in_flight(plan.training_schedule(count))
    if not all_layers:
        raise ActivationError(
            f"ActivationOffload and ActivationCompression: {type(module).__name__} has no layers; leave them out",
            entry="activations-none",
        )
    compression, offload = requests.compression, requests.offload
    if compression is not None:
        _check_compression(compression, all_layers, is_compiled or bool(compiled_modules(module, layers.values())))
    moving = None
    if offload is not None:
        shares = offload.share_of_layers({fqn: stage_of.get(fqn, 0) for fqn in layers}, list(all_layers), in_flight)
        moving = Moving(_place(offload, device, run.until_end), offload.min_bytes, shares)
    key = partial(microbatch_key, setting.trainer, setting.seed, setting.world.data_rank, run.randomness)
    return LayerActivations(layers, device, compression=compression, moving=moving, microbatch_key=key)


def microbatch_key(trainer: Any, seed: int, replica: int, randomness: KeyedRandomness) -> tuple[int, int]:
    """Return a key of the running microbatch, and the number of its run; the same if it runs again, but for the number.

    Where random numbers are not keyed, it is that of the batch of this replica.
    """
    keyed = randomness.microbatch_key
    if keyed is None:
        keyed = mix(seed, trainer.fit_loop.epoch_loop.total_batch_idx, replica)
    return keyed, randomness.num_runs


def _layers_of_stages(plan: StagePlan) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """Return the layers of all stages, and the stage of each, by FQN."""
    assert plan.first is not None
    recording, assignment = plan.first.recording, plan.first.assignment
    stages: dict[str, int] = {}
    for node, stage in zip(recording.graph.nodes, assignment.node_stage, strict=True):
        if node.unit:
            stages.setdefault(node.unit, stage)
    found, stage_of = {}, {}
    for fqn, layer in find_layers(recording.units).items():
        unit = next((unit for unit in stages if fqn == unit or fqn.startswith(f"{unit}.")), None)
        if unit is not None:
            found[fqn], stage_of[fqn] = layer, stages[unit]
    return found, stage_of


def _place(offload: Offload, device: torch.device, until_end: contextlib.ExitStack) -> InPlace:
    """Return where tensors are moved to."""
    host = HostMemory(device) if device.type == "cuda" else None
    if offload.to.startswith(DISK):
        file = ActivationFile(offload.to.removeprefix(DISK), host)
        until_end.callback(file.close)
        return file
    if host is None:
        raise ActivationError(
            f"ActivationOffload(to='cpu'): the device of this run is {device.type!r}, whose tensors are in host memory"
            " already; set to='disk:' and a folder, or leave it out",
            entry="activation-offload-host",
        )
    return host


def _check_compression(compression: Compression, layers: Sequence[str] | dict[str, nn.Module], compiled: bool) -> None:
    """Refuse compression that cannot be done as requested."""
    if compiled:
        raise ActivationError(
            f"ActivationCompression(bits={compression.bits}): layers are compiled, and code of torch.compile does not"
            " show which of its saved tensors may be quantized; leave compile out, or use ActivationOffload",
            entry="activation-compression-compiled",
        )
    for pattern in compression.exclude:
        if not any(compression.matches(pattern, fqn) for fqn in layers):
            raise ActivationError(
                f"ActivationCompression(exclude=...) names {pattern!r}, which matches no layer; the layers are"
                f" {', '.join(layers)}",
                entry="activation-offload-name",
            )
