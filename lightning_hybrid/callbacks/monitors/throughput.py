"""Callback that logs throughput: samples, tokens and FLOPs per second, MFU, waits for input, and messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.callbacks.monitors.messages import AXIS_NAMES, SentBytes
from lightning_hybrid.callbacks.pictures import Series, gather_rows, keep_series
from lightning_hybrid.callbacks.steps import step_of
from lightning_hybrid.patching import around, around_method
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.counts import flops_of_kernel

_RATES = ("batches_per_sec", "samples_per_sec", "items_per_sec", "flops_per_sec")
_WHAT = "ThroughputMonitor"
_COUNTED_BATCH = 2  # the first one may be run twice, to be compared with one process


class ThroughputMonitor(lightning_callbacks.ThroughputMonitor):
    """Lightning's `ThroughputMonitor`, which finds samples, tokens and FLOPs itself, and logs waits and messages too.

    It logs what Lightning's logs, under the same names: "train/samples_per_sec", "train/items_per_sec" (tokens),
    "train/flops_per_sec" and "train/device/mfu", among others. The figures over all devices are logged on one device
    too. Besides:

    - "train/device/tflops_per_sec": 1e12 floating-point operations per second and device;
    - "train/input_wait_share": share of the time for which the training loop waited for its loader, of the rank that
      waited longest;
    - "train/sent_bytes/AXIS": bytes that a rank sends in a step to other ranks of an axis ("data",
      "context", "tensor", "pipeline", "experts", or "several"), mean over all ranks. Collectives count as in a ring.

    FLOPs are those of matrix products, convolutions and attention, in the forward and the backward of a replica's
    batch, without recomputation; not those of the optimizer. They are taken from the recorded step where layers are
    partitioned or sharded, and counted in the second batch of the first rank elsewhere. A module's own
    ``flops_per_batch`` is used in their place. They are taken to be proportional to the samples of a batch.

    Rates are means over the latest ``window_size`` batches, and logged once there are so many. Bytes and waits are
    exchanged in one small collective each time that the Trainer logs.

    Args:
        batch_size_fn: ``function(batch) -> samples``; by default the size of the first dimension of its tensors.
        length_fn: ``function(batch) -> tokens``; by default the number of elements of "input_ids", or of the first
            integer tensor of two dimensions; no tokens are logged where a batch has none.
        available_flops: Peak FLOPs per second of a device; by default those that Lightning knows for the GPU.
        window_size: Number of batches.

    Raises:
        ValueError: ``window_size`` is below 2, or ``available_flops`` is not positive.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        available_flops: float | None = None,
        window_size: int = 100,
    ) -> None:
        if window_size < 2:
            raise ValueError(f"window_size={window_size} must be at least 2: rates need the time between two batches")
        if available_flops is not None and available_flops <= 0:
            raise ValueError(f"available_flops={available_flops} must be positive")
        super().__init__(batch_size_fn or _samples_of, length_fn, window_size=window_size)
        self.peak_flops = available_flops
        self.flops_per_sample: float | None = None
        self._finds_tokens = length_fn is None
        self._why_no_flops = ""
        self.series: Series = {}
        self._forget_run()

    def _forget_run(self) -> None:
        self._counter: StepFlopCounter | None = None
        self._sent: SentBytes | None = None
        self._undo = contextlib.ExitStack()
        self._num_batches = 0
        self._fetch_start = self._since = perf_counter()
        self._waited = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings and the figures, without what belongs to a run."""
        return {**self.__dict__, "_counter": None, "_sent": None, "_undo": contextlib.ExitStack()}

    def connect_flops(self, flops_per_sample: float | None, why_not: str = "") -> None:
        """Take the FLOPs of a training step per sample, or why this rank can neither have nor count them."""
        self.flops_per_sample, self._why_no_flops = flops_per_sample, why_not

    # -- a run --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepares the figures of a stage."""
        super().setup(trainer, pl_module, stage)
        self.flops_per_sample, self._why_no_flops = None, ""
        if self.peak_flops is not None:
            self.available_flops = self.peak_flops  # type: ignore[assignment]
            for throughput in self._throughputs.values():
                throughput.available_flops = self.peak_flops

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Starts to measure waits for input."""
        with only_informs(_WHAT):
            super().on_train_start(trainer)
        self._undo.close()
        self._forget_run()
        self.series = {}
        loop: Any = trainer.fit_loop.epoch_loop
        for name, hook in (("_on_before_fetch", self._before_fetch), ("_on_after_fetch", self._after_fetch)):
            self._undo.callback(around(loop, name, hook, reason="measures waits for input"))
        layout = getattr(trainer.strategy, "layout", None)
        if layout is not None and layout.world_size > 1 and dist.is_initialized():
            mesh: Any = trainer.strategy.mesh  # type: ignore[attr-defined]
            self._sent = SentBytes(layout, mesh.group("ep") if layout.joins_replicas else None)

    def _before_fetch(self, original: Callable[[], None]) -> None:
        original()
        self._fetch_start = perf_counter()

    def _after_fetch(self, original: Callable[[], None]) -> None:
        self._waited += perf_counter() - self._fetch_start
        original()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts to count the FLOPs of the second batch, and the messages of steps that are logged."""
        self._num_batches += 1
        with only_informs(_WHAT):
            self._start_counters(trainer, pl_module, batch)

    def _start_counters(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if self._num_batches == 1:
            self._find_tokens(batch)
        counts_flops = trainer.is_global_zero and self._num_batches == _COUNTED_BATCH
        if counts_flops and self.flops_per_sample is None and not hasattr(pl_module, "flops_per_batch"):
            if self._why_no_flops:
                rank_zero_info(f"ThroughputMonitor logs no FLOPs: {self._why_no_flops}; set flops_per_batch")
            else:
                self._counter = StepFlopCounter()
                self._counter.start(pl_module)
        step = step_of(trainer)
        if self._sent is not None and step.begins and step.is_logged:
            self._sent.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Logs the figures; collective over all ranks where they are logged."""
        with only_informs(_WHAT):
            if self._counter is not None:
                counter, self._counter = self._counter, None
                counter.stop()
                self.flops_per_sample = counter.flops / self.batch_size_fn(batch)
            super().on_train_batch_end(trainer, pl_module, outputs, batch, *args)
        step = step_of(trainer)
        if step.ends and step.is_logged:
            self._log_waits_and_messages(trainer, step.number)

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        """Leaves out the time of validation."""
        with only_informs(_WHAT):
            super().on_validation_start(trainer, *args)
        self._validation_start = perf_counter()

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        """Leaves out the time of validation."""
        with only_informs(_WHAT):
            super().on_validation_end(trainer, *args)
        self._since += perf_counter() - self._validation_start

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restores what was replaced."""
        self._undo.close()
        if self._counter is not None:
            self._counter.stop()
        if self._sent is not None:
            self._sent.stop()

    on_exception = on_train_end

    # -- figures ------------------------------------------------------------------------------------------------------

    def _find_tokens(self, batch: Any) -> None:
        if self._finds_tokens:
            self.length_fn = None if _tokens_of(batch) is None else _tokens_of  # type: ignore[assignment]

    def _update(self, trainer: Trainer, pl_module: LightningModule, batch: Any, iter_num: int) -> None:
        flops = None
        if trainer.state.stage == RunningStage.TRAINING:
            flops = getattr(pl_module, "flops_per_batch", None)
            if flops is None and self.flops_per_sample is not None:
                flops = self.flops_per_sample * self.batch_size_fn(batch)
        self._module_has_flops = flops is not None
        module: Any = SimpleNamespace(flops_per_batch=flops)
        super()._update(trainer, module, batch, iter_num)

    def _compute(self, trainer: Trainer, iter_num: int | None = None) -> None:
        if not trainer._logger_connector.should_update_logs:
            return
        stage: Any = trainer.state.stage
        throughput = self._throughputs[stage]
        metrics: dict[str, Any] = dict(throughput.compute())
        device = f"device{throughput.separator}"
        for rate in _RATES:
            if device + rate in metrics:
                metrics.setdefault(rate, metrics[device + rate])  # Lightning leaves it out on one device
        if device + "flops_per_sec" in metrics:
            metrics[device + "tflops_per_sec"] = metrics[device + "flops_per_sec"] / 1e12
        named = {f"{stage.value}{throughput.separator}{name}": value for name, value in metrics.items()}
        if stage == RunningStage.TRAINING:
            keep_series(self.series, named, step_of(trainer).number)
        trainer._logger_connector.log_metrics(named, step=iter_num)

    def _log_waits_and_messages(self, trainer: Trainer, step: int) -> None:
        now = perf_counter()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited, self._since = 0.0, now
        row = [share, *(0.0 for _ in AXIS_NAMES)]
        with only_informs(_WHAT):
            if self._sent is not None:
                self._sent.stop()
                row[1:] = [self._sent.counts[name] for name in AXIS_NAMES]
        rows = gather_rows(torch.tensor(row, dtype=torch.float64), trainer.strategy)
        if trainer.is_global_zero:
            self._log_rows(trainer, rows, step)

    @only_informs(_WHAT)
    def _log_rows(self, trainer: Trainer, rows: Tensor, step: int) -> None:
        metrics: dict[str, Any] = {"train/input_wait_share": rows[:, 0].max().item()}
        for name, mean in zip(AXIS_NAMES, rows[:, 1:].mean(0).tolist(), strict=False):
            if mean:
                metrics[f"train/sent_bytes/{name}"] = mean
        keep_series(self.series, metrics, step)
        trainer._logger_connector.log_metrics(metrics)


def _samples_of(batch: Any) -> int:
    size = batch_size_of(batch)
    if size is None:
        raise ValueError(
            f"ThroughputMonitor finds no number of samples in a batch of type {type(batch).__name__}; set"
            " batch_size_fn=function(batch) -> samples"
        )
    return size


def _tokens_of(batch: Any) -> int | None:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].numel())
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype in (torch.int32, torch.int64):
            return leaf.numel()
    return None


# FLOPs of a training step, counted while the step of the user runs on this rank.
# Only the forward is counted as it runs; the FLOPs of its backward follow from the operands that require a gradient. So
# layers that are recomputed in the backward count once, as the definition of MFU has it (Chowdhery et al., "PaLM",
# arXiv 2204.02311, appendix B).


class StepFlopCounter(TorchDispatchMode):
    """Counts the FLOPs of forwards that run inside, and of their backwards; not the kernels of a backward itself.

    Attributes:
        flops: So far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self._undo = contextlib.ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel, and count it if no backward runs it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            self.flops += sum(flops_of_kernel(func, args, kwargs, out))
        return out

    def start(self, module: LightningModule) -> None:
        """Count the training steps of a module from now on; compiled layers run without compilation."""
        self._undo.callback(around_method(module, "training_step", self._run, reason="counts FLOPs"))

    def stop(self) -> None:
        """Count no further steps."""
        self._undo.close()

    def _run(self, module: Any, run: Callable[[], Any]) -> Any:
        del module
        with torch.compiler.set_stance("force_eager"), self:
            return run()
