"""Training batches that are profiled for a budget of memory, between two steps of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hybrid.strategies.world.callbacks import RunCallback

if TYPE_CHECKING:
    from lightning_hybrid.memory.recompute.budget import BudgetedLayers, BudgetReport


class BudgetProfile(RunCallback):
    """Tells `BudgetedLayers` when batches begin and end, and which tensors there are between them."""

    def __init__(self, setting: Any, budget: BudgetedLayers, owner: Any) -> None:
        self._setting, self._budget, self._owner = setting, budget, owner
        self._is_profiling = False
        self._steps = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to profile, once the optimizer has its states."""
        begins = self._budget.wants_profile and trainer.global_step > 0
        if not (self._is_profiling or begins):
            return
        if not self._is_profiling:
            self._is_profiling, self._steps = True, trainer.global_step
        device = self._setting.device
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        self._budget.begin_batch(self._tensors(), allocated)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The backwards are over."""
        self._budget.begin_optimizer_step()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Choose, if the optimizer has stepped."""
        if not self._is_profiling:
            return
        has_stepped = trainer.global_step > self._steps
        self._is_profiling = not has_stepped
        if self._budget.end_batch(has_stepped=has_stepped) and self._budget.report is not None:
            rank_zero_info(describe_choices(self._budget.report, self._setting.recompute))

    def _tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers, gradients, messages of gradients and optimizer states, without those in files."""
        in_files = {kind for kind, where in self._setting.options.offloaded.items() if where != "cpu"}
        module = self._setting.module
        for parameter in module.parameters():
            if "parameters" not in in_files:
                yield parameter
            if parameter.grad is not None and "gradients" not in in_files:
                yield parameter.grad
        yield from module.buffers()
        for reducer in self._owner.optimization.reducers.values():
            yield from reducer.messages
        if "optimizer_states" not in in_files:
            for optimizer in self._setting.trainer.optimizers:
                states = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
                yield from (leaf for leaf in states if isinstance(leaf, Tensor))


def describe_choices(report: BudgetReport, recompute: Any) -> str:
    """Return the line that the first rank prints once its recomputation is chosen."""
    shares = list(report.kept_share.values())
    everything = sum(share == 1.0 for share in shares)
    least = f"; the others keep {100 * min(shares):.0f} % or more of their bytes" if everything < len(shares) else ""
    least = "; the others are recomputed in full" if least and set(shares) <= {0.0, 1.0} else least
    return (
        f"recompute={recompute!r}: {report.budget:,.0f} bytes on the first rank, {report.floor:,.0f} bytes are"
        f" the least; {everything} of {len(shares)} layers keep everything{least};"
        f" {100 * report.recomputed_share:.0f} % of all bytes that layers would save are recomputed"
    )
