"""The run of an experiment under a layout, on one of its ranks."""

from __future__ import annotations

import importlib
import tempfile
import time
from types import ModuleType
from typing import Any

import torch.distributed as dist

from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.records.run_record_and_recorder import RunRecord
from lightning_hybrid.verify.run_experiment import Experiment, run_in_folder

# How long a rank that failed waits for the other ranks to fail in the same way.
_WAIT_SECONDS = 5.0


class LayoutConnection:
    """The connection that makes the strategy of a layout."""

    def __init__(self, layout: Layout, num_microbatches: int | None) -> None:
        """Take ``layout`` (the layout to run under), ``num_microbatches`` (the number where the layout names none)."""
        self.devices = layout.devices
        self._layout, self._num_microbatches = layout, num_microbatches

    def strategy(self, pl: ModuleType) -> Any:
        """Make the strategy as ``Trainer(strategy=name)`` does, with the options of the layout."""
        registry = importlib.import_module(f"{pl.__name__}.strategies").StrategyRegistry
        entry = registry[self._layout.strategy_name]
        return entry["strategy"](**{**entry["init_params"], **self._layout.options(self._num_microbatches)})

    def connect(self, trainer: Any, module: Any) -> None:
        """Do nothing: the strategy is all that a layout sets."""

    def finish(self, observed: RunRecord) -> None:
        """Do nothing: the record is complete."""


def run_layout(experiment: Experiment, layout: Layout, connection: LayoutConnection | None = None) -> RunRecord:
    """Run an experiment on one rank of a layout; a rank that fails while others still run raises its error.

    Args:
        experiment: The run.
        layout: The layout to run under.
        connection: Makes the strategy; ``LayoutConnection`` by default.

    Raises:
        RuntimeError: This rank failed and others still run.
    """
    connection = connection or LayoutConnection(layout, experiment.num_microbatches)
    # All ranks read and write the folder of rank 0, so it stays until the last one has ended.
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        observed = run_in_folder(folder, experiment, connection)
        if layout.devices > 1 and not _all_ended(layout.devices) and observed.failure is not None:
            raise RuntimeError(f"{observed.failure.message} ({observed.failure.where}); other ranks still run")
    return observed


def _all_ended(world_size: int) -> bool:
    if not dist.is_initialized():
        return True  # no other rank can be waiting in a collective with this one
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + _WAIT_SECONDS
    count = store.add("verify/ended", 1)
    while count < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
        count = store.add("verify/ended", 0)
    return True
