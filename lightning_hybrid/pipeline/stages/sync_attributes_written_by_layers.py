"""Synchronisation of plain attributes (a counter, a running mean) that layers write on the rank that runs them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import detached_copy
from lightning_hybrid.step.standins.absent_tensors import is_absent

_PLAIN = (bool, int, float, str, type(None))


def sync_unit_attributes(plan: StagePlan, root: nn.Module) -> None:
    """All-gather the plain attributes of layers from the ranks that run them; collective over the pipeline.

    Args:
        plan: The rank of each layer.
        root: The user's module.
    """
    local = io.BytesIO()
    owners = _owners(plan)
    modules = dict(root.named_modules(remove_duplicate=False))
    torch.save({fqn: _plain(modules[fqn]) for fqn, owner in owners.items() if owner == plan.rank}, local)
    rows: list[Any] = [None] * plan.num_ranks
    dist.all_gather_object(rows, local.getvalue(), group=plan.group)
    for rank, row in enumerate(rows):
        if rank == plan.rank:
            continue
        for fqn, attributes in torch.load(io.BytesIO(row), map_location="cpu", weights_only=True).items():
            for name, value in attributes.items():
                modules[fqn].__dict__[name] = _on_device_of(modules[fqn].__dict__.get(name), value)


def _owners(plan: StagePlan) -> dict[str, int]:
    """The rank that runs a module inside a unit, by FQN."""
    if plan.first is None:
        return {}
    units = plan.first.recording.units
    owners: dict[str, int] = {}
    for fqn, stage in plan.first.unit_stages.items():
        for inner, _ in units[fqn].named_modules(prefix=fqn):
            owners.setdefault(inner, plan.rank_of(stage))
    return owners


def _plain(module: nn.Module) -> Mapping[str, Any]:
    return {name: map_leaves(_detached, v) for name, v in vars(module).items() if name[:1] != "_" and _is_plain(v)}


def _detached(leaf: Any) -> Any:
    return detached_copy(leaf) if isinstance(leaf, Tensor) else leaf


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and not is_absent(value)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) in _PLAIN for key in value) and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN


def _on_device_of(before: Any, value: Any) -> Any:
    """The received value, on the device of the attribute before."""
    if isinstance(before, Tensor) and isinstance(value, Tensor) and not is_absent(before):
        return value.to(before.device)
    return value
