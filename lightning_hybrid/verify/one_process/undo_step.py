"""Runs of a step that leave nothing behind, and the module's own leaves that they are told apart by."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.module_state.snapshot import ModuleState
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.verify.records.run_record import perturb


@contextlib.contextmanager
def undone(module: nn.Module, *, without: Collection[nn.Module] = ()) -> Iterator[None]:
    """What steps log inside is not logged, and what they leave on the modules is put back.

    Args:
        module: The user's.
        without: Modules whose attributes stay, but for buffers and metrics.
    """
    state = ModuleState(module, buffers=False, without=without)
    metrics = [inner for inner in module.modules() if isinstance(inner, Metric)]
    states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
    # BatchNorm writes its running averages without a trace in their versions.
    written = [*module.buffers(), *(value for value in states if isinstance(value, Tensor))]
    contents = [(value, value.detach().clone()) for value in written if not is_absent(value)]
    bound = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    for metric in metrics:
        metric.distributed_available_fn = _nowhere
    try:
        with replaced(module, "log", lambda *_, **__: None):
            yield
    finally:
        state.restore()
        for holder, members in bound:
            holder.clear()
            holder.update(members)
        with torch.no_grad():
            for value, content in contents:
                value.detach().copy_(content)


@contextlib.contextmanager
def perturbed(module: nn.Module, size: float) -> Iterator[None]:
    """The weights are others inside, by a relative ``size``."""
    weights = [parameter.detach().to("cpu", copy=True) for parameter in module.parameters()]
    try:
        perturb(module, size)
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                parameter.copy_(weight)


def _nowhere() -> bool:
    """Whether a metric may ask other processes."""
    return False


def equal(one: Any, other: Any) -> bool:
    """Whether two leaves hold the same; of objects that are no values, whether they are of one type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if hasattr(one, "__array__"):
        return equal(torch.as_tensor(one), torch.as_tensor(other)) if one.dtype.kind in "biufc" else True
    return bool(one == other) if isinstance(one, int | float | complex | str | bytes) or one is None else True
