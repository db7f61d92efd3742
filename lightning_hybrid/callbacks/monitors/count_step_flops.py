"""FLOPs of a training step, counted while the step of the user runs on this rank.

Only the forward is counted as it runs; the FLOPs of its backward follow from the operands that require a gradient. So
layers that are recomputed in the backward count once, as the definition of MFU has it (Chowdhery et al., "PaLM",
arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.patching import around_method
from lightning_hybrid.step.standins.count_flops_bytes_and_draws import flops_of_kernel


class StepFlopCounter(TorchDispatchMode):
    """Counts the FLOPs of forwards that run inside, and of their backwards; not the kernels of a backward itself.

    Attributes:
        flops: So far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self._undo: Callable[[], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel, and count it if no backward runs it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            self.flops += sum(flops_of_kernel(func, args, kwargs, out))
        return out

    def start(self, module: LightningModule) -> None:
        """Count the training steps of a module from now on; compiled layers run without compilation."""
        self._undo = around_method(module, "training_step", self._run, reason="counts FLOPs")

    def stop(self) -> None:
        """Count no further steps."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def _run(self, module: Any, run: Callable[[], Any]) -> Any:
        del module
        with torch.compiler.set_stance("force_eager"), self:
            return run()
