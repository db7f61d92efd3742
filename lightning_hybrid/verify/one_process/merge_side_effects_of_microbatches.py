"""Side effects of microbatches on a module: list entries are joined, all others happen once per microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torchmetrics import Metric

from lightning_hybrid.pipeline.side_effects.join_appended_entries import AppendedEntries, Rows, merged
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import ModuleSnapshot


class MicrobatchSideEffects:
    """Side effects of the microbatches of one batch; where ranks run shares of it, those of the first rank remain."""

    def __init__(self, module: nn.Module, shares: int) -> None:
        # Metrics accumulate over all shares.
        self._metrics = [inner for m in module.modules() if isinstance(m, Metric) for inner in m.modules()]
        self._start = ModuleSnapshot(module, without=self._metrics) if shares > 1 else None
        self._end: ModuleSnapshot | None = None
        self._module, self._share = module, 0
        self._appended = AppendedEntries(module)
        self._rows: list[Rows] = []
        self._counts = [0]

    def before_microbatch(self, share: int) -> None:
        """Prepare for a microbatch of a share; each share starts from the module's state before the batch."""
        if share != self._share:
            self._leave()
            assert self._start is not None
            self._start.restore()
            self._appended, self._share = AppendedEntries(self._module), share
            self._counts.append(0)

    def after_microbatch(self) -> None:
        """Record the side effects of the microbatch that has run."""
        self._appended.after_microbatch()
        self._counts[-1] += 1

    def _leave(self) -> None:
        self._rows.append(self._appended.rows)
        if self._share == 0:
            self._end = ModuleSnapshot(self._module, without=self._metrics)

    def finish(self, weights: Sequence[float], sizes: Sequence[int | None]) -> None:
        """Merge the entries after the last microbatch, by the weights and sizes (samples) of the microbatches."""
        self._leave()
        assert self._end is not None
        if len(self._rows) > 1:
            self._end.restore()
        self._appended.put(merged(self._rows, self._counts), weights, sizes)
