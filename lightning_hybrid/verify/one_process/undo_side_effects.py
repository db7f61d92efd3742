"""Context that undoes the side effects of a step on the module and its metrics, and discards what it logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import ModuleSnapshot
from lightning_hybrid.step.standins.absent_tensors import is_absent


@contextlib.contextmanager
def without_side_effects(module: nn.Module) -> Iterator[None]:
    """Context that discards what steps log, and restores the states of all modules inside at its end."""
    state = ModuleSnapshot(module, buffers=False)
    metrics = [inner for inner in module.modules() if isinstance(inner, Metric)]
    states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
    # BatchNorm writes its running averages without a trace in their versions.
    written = [*module.buffers(), *(value for value in states if isinstance(value, Tensor))]
    contents = [(value, value.detach().clone()) for value in written if not is_absent(value)]
    bound = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    for metric in metrics:
        metric.distributed_available_fn = _is_undistributed
    try:
        with replaced(module, "log", lambda *_, **__: None, reason="runs without logs"):
            yield
    finally:
        state.restore()
        for buffers, before in bound:
            buffers.clear()
            buffers.update(before)
        with torch.no_grad():
            for value, content in contents:
                value.detach().copy_(content)


def _is_undistributed() -> bool:
    """Whether a metric may communicate with other processes: never."""
    return False
