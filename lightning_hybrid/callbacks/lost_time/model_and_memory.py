"""What the file of measured costs says of the model and its memory: names and sizes, and the peak of tensors."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parameter import is_lazy

from lightning_hybrid.callbacks.monitors.gather_rows import gather_rows
from lightning_hybrid.callbacks.monitors.memory_monitor import MemoryMonitor
from lightning_hybrid.callbacks.monitors.memory_of_tensors import PeakMeter
from lightning_hybrid.planner.costs.layer_costs import checksum_of_names
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.batch.split_batch_into_microbatches import elements_per_sample


class ModelAndMemory:
    """The model of a run, and the peak memory of its tensors in a measured step.

    The peak is that of the run's `MemoryMonitor`, if there is one that has measured. On a GPU it is otherwise that of
    the allocator in the measured step, whose peak statistic is reset when that step begins.
    """

    def __init__(self) -> None:
        self.model: dict[str, Any] = {}
        self.peaks: tuple[int, ...] = ()
        self.first_step = 1
        self._meter: PeakMeter | None = None

    def describe(self, module: LightningModule) -> None:
        """Take the names and the number of the parameters, before ranks hold shards of them."""
        named = list(module.named_parameters())
        self.model = {"name": type(module).__name__}
        if named and not any(is_lazy(parameter) for _, parameter in named):
            self.model |= {
                "parameters": sum(parameter.numel() for _, parameter in named),
                "names_checksum": checksum_of_names(name for name, _ in named),
            }

    def begin_step(self, trainer: Trainer) -> None:
        """Begin a measured step."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            self._meter = PeakMeter(device)
            self._meter.start()

    def end_step(self, trainer: Trainer, batch: Any) -> None:
        """End a measured step; collective over all ranks on GPUs."""
        with only_informs("the file of measured costs"):
            elements = elements_per_sample(batch)
            if elements is not None:
                self.model["sample_elements"] = elements
        if trainer.strategy.root_device.type == "cuda":
            peak, meter, self._meter = 0, self._meter, None
            with only_informs("the measured memory"):
                peak = 0 if meter is None else meter.stop(0)
            rows = gather_rows(torch.tensor([peak], dtype=torch.float64), trainer.strategy)
            if rows.min() > 0:  # all ranks have measured
                self.peaks = tuple(int(row[0]) for row in rows)

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        """Return fields of `MeasuredCosts`."""
        callbacks: Any = trainer
        monitors = [each for each in callbacks.callbacks if isinstance(each, MemoryMonitor) and each.measured]
        peaks = tuple(int(row["peak"]) for row in monitors[0].measured) if monitors else self.peaks
        return {"model": dict(self.model), "peak_memory": peaks, "first_step": self.first_step}
