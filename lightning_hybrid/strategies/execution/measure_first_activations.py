"""The activations of the first training step without stages, where no recorded step gives an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.counts import bytes_saved_behind
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.strategies.run.setting import Setting
from lightning_hybrid.text import sized


class FirstActivations:
    """Prints once, on the first rank, what the first forward of a run has saved for its backward."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._is_pending = setting.is_fitting and setting.world.mesh.rank == 0
        self._batch: list[Tensor] = []

    def begin(self, arguments: Sequence[Any]) -> None:
        """Take the arguments of a training step, whose tensors are no activations."""
        if self._is_pending:
            self._batch = [leaf for leaf in flatten(list(arguments))[0] if isinstance(leaf, Tensor)]

    def measure(self, loss: Tensor) -> None:
        """Read the graph behind a scalar loss, before its backward; autograd keeps what it kept."""
        if not self._is_pending or is_absent(loss):  # while a step is recorded that calls its backwards itself
            return
        self._is_pending, batch, self._batch = False, self._batch, []
        # Only this rank measures: operations of sharded tensors would gather them, which is collective.
        with only_informs("the measured size of activations"), torch._C.DisableTorchFunctionSubclass():
            size = bytes_saved_behind(loss, self._setting.module, batch)
            what = "microbatch" if (self._setting.options.microbatches or 1) > 1 else "batch"
            rank_zero_info(f"activations of the first {what}: {sized(size)}, measured before its backward")
