"""Callbacks for saved activations: recomputed, offloaded, compressed.

`Hybrid3DStrategy(recompute=...)` is equivalent to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybrid.callbacks.pictures import is_wanted, sum_over_ranks
from lightning_hybrid.callbacks.steps import step_of
from lightning_hybrid.memory.recompute.policies import Recompute, check_recompute
from lightning_hybrid.memory.saved_activations.requests import Compression, Fraction, Offload


class ActivationCheckpointing(Callback):
    """Enables activation checkpointing of layers; the module itself is not changed.

    Args:
        recompute: "full" or "selective" for all layers, or the share of bytes that selective ones save; n for every
            n-th; names of modules, with wildcards, or classes; a mapping of these to such policies or "keep"; or a
            budget of the rank such as "6GiB", or "50%" of the free memory.

    Raises:
        ValueError: ``recompute`` is none of these.
    """

    def __init__(self, recompute: Recompute = "full") -> None:
        check_recompute(recompute)
        self.recompute = recompute

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Passes the option to the strategy.

        Raises:
            TypeError: The strategy is not of this package.
        """
        _strategy_of(trainer, self).request_recomputation(self.recompute)


class _Storing(Callback):
    """Requests how saved activations are stored."""

    request: Offload | Compression

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Passes the request to the strategy.

        Raises:
            TypeError: The strategy is not of this package.
        """
        _strategy_of(trainer, self).request_saved_activations(self.request)


class ActivationOffload(_Storing):
    """Moves the tensors that layers save for the backward to host memory or to a file; results are bitwise the same.

    They are copied while the forward goes on, and fetched ahead in the order of the backward. A storage is moved once,
    however many views of it are saved. Parameters, and inputs that something else keeps alive, stay.

    Args:
        min_bytes: Of a storage that is moved; smaller ones stay on the device.
        fraction: Share of the bytes that is moved: a number; a list of one per pipeline stage; or a mapping from names
            of layers, with wildcards, to numbers, of which the last that matches counts, and other layers stay. None:
            all in a run without stages, and with n microbatches in flight 1 - 1/n, so that each stage keeps the bytes
            of one microbatch.
        to: "cpu" for pinned host memory, or "disk:" and a folder, such as "disk:/scratch", for a file in it.

    Raises:
        ValueError: An argument is not valid.
    """

    def __init__(self, min_bytes: int = 65536, fraction: Fraction | None = None, to: str = "cpu") -> None:
        self.request = Offload(min_bytes, _plain(fraction), to)


class ActivationCompression(_Storing):
    """Compresses the tensors that layers save for the backward, and logs the ratio and the error of gradients.

    Activations are quantized in groups of 256 values, with stochastic rounding: a gradient that is linear in them has
    the exact gradient as expectation. The sign that ReLU needs, masks and integers (indices of max-pooling) are packed
    exactly. Parameters, statistics of normalization and attention, and results of log-softmax stay exact.

    Every n steps it logs "activation_compression_ratio", the bytes that layers save over those that are stored, and
    "activation_gradient_error", the relative error of the gradients of one layer of each rank in one microbatch, given
    the gradient of its output; the next measurement takes the next layer.

    Args:
        bits: Of a value: 8, 4, 2 or 1. Below 8, what attention saves still has 8.
        min_bytes: Of a storage; smaller ones stay exact.
        exclude: Names of layers, with wildcards, whose tensors are not quantized.
        every_n_steps: Steps between two measurements; the first step is one. 0 measures nothing.

    Raises:
        ValueError: An argument is not valid.
    """

    def __init__(
        self, bits: int = 8, min_bytes: int = 4096, exclude: Sequence[str] = (), every_n_steps: int = 50
    ) -> None:
        self.request = Compression(bits, min_bytes, (exclude,) if isinstance(exclude, str) else tuple(exclude))
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 0:
            raise ValueError(f"every_n_steps={every_n_steps!r} must be an int of at least 0")
        self.every_n_steps = every_n_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins a measurement, if one is due."""
        if (activations := self._measured(trainer)) is not None:
            activations.begin_measurement()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the measurement, if there was one; collective."""
        if (activations := self._measured(trainer)) is None:
            return
        counts = activations.bytes
        values = [counts.saved, counts.on_device, *activations.error.sums]
        total = sum_over_ranks(torch.tensor(values, dtype=torch.float64), trainer.strategy)
        saved, on_device, error, exact = total.tolist()
        if on_device:
            self._log(pl_module, "activation_compression_ratio", saved / on_device)
        if exact:
            self._log(pl_module, "activation_gradient_error", (error / exact) ** 0.5)

    def _measured(self, trainer: Any) -> Any:
        """The stored activations of the run, if they are measured in this batch."""
        step, every = step_of(trainer), self.every_n_steps
        return trainer.strategy.run.activations if every and step.begins and is_wanted(step.number, 1, every) else None

    @staticmethod
    def _log(pl_module: LightningModule, name: str, value: float) -> None:
        pl_module.log(name, value, on_step=True, on_epoch=False, rank_zero_only=False)


def _plain(fraction: Any) -> Any:
    """Returns a mapping or list of the command line as a plain one."""
    if fraction is None or isinstance(fraction, int | float):
        return fraction
    return dict(fraction) if hasattr(fraction, "items") else list(fraction)


def _strategy_of(trainer: Trainer, callback: Callback) -> Any:
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "request_saved_activations"):
        raise TypeError(
            f"{type(callback).__name__} needs a strategy of lightning_hybrid, and the Trainer has"
            f" {type(strategy).__name__}; set strategy='hybrid3d'"
        )
    return strategy
