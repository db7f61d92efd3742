"""AdaScale: scales learning rates by the gain of a larger batch.

A step over S times as many samples averages the noise of the gradient away, but not its mean. From the gradients of
the single batches, before they are averaged, the callback estimates both, and the gain between 1 (only mean: the larger
batch adds no information) and S (only noise: it is worth S small steps). Johnson et al., "AdaScale SGD"
(arXiv 2007.05105), section 3 and appendix B.3.

fairscale implements it as an optimizer that wraps another. It sums over the default process group, which here includes
pipeline stages, and needs a gradient for every parameter; so the estimate is made here, and tested against it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.mesh import Mesh

_MIN_VARIANCE = 1e-6  # fairscale's


class GradientNoise(Callback):
    """Estimates the squared mean of the gradient and its variance, from single batches and their average.

    The single batches are those of gradient accumulation and of the data-parallel ranks. Every parameter counts once,
    whichever ranks hold it. A step whose gradients are not finite is ignored.

    It is a `GradientObserver`: a strategy with data-parallel ranks calls `connect_mesh` and makes it the observer of
    its reducer. In one process Lightning's hooks are enough.
    """

    def __init__(self, *, scale: float | None = None, smoothing: float | None = None) -> None:
        if scale is not None and scale < 1:
            raise ValueError(f"scale={scale} is below 1; leave it out for data_parallel_size * accumulate_grad_batches")
        if smoothing is not None and not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing} must be at least 0 and below 1")
        self.scale = scale
        self.smoothing = smoothing
        self._mesh: Mesh | None = None
        self._owned: tuple[Set[int] | None, Set[int] | None] = None, None
        self._each_batch = False
        # Per parameter group: moving averages of the squared mean and of the variance / S, and their total weights.
        self._averages = torch.zeros(2, 0, dtype=torch.float64)
        self._weights = torch.zeros(0, dtype=torch.float64)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings and the estimates, without the ranks of a run."""
        return {**self.__dict__, "_mesh": None, "_owned": (None, None)}

    def connect_mesh(
        self, mesh: Mesh, owned_parameters: tuple[Set[int], Set[int]], *, each_batch: bool = False
    ) -> None:
        """Connects the ranks, and the ids of the parameters that this rank counts before and after averages.

        With ``each_batch`` gradients are sharded over replicas (ZeRO): they are averaged after each batch.
        """
        self._mesh, self._each_batch, self._owned = mesh, each_batch, owned_parameters

    # --- single gradients --------------------------------------------------------------------------------------------

    def before_average(self, parameter: Tensor, gradient: Tensor) -> None:
        """Records what this rank's latest batch has added to a gradient, in the parameter's full shape."""
        gradient, earlier = _dense(gradient), self._before.pop(id(parameter), None)
        added = gradient if earlier is None else gradient - earlier
        self._local[id(parameter)] = self._local.get(id(parameter), 0.0) + _square(added)

    def after_average(self, parameter: Tensor, average: Tensor) -> None:
        """Records the gradient that the step will use if no batches follow, in the full or the shard's shape."""
        self._total[id(parameter)] = _square(_dense(average))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the batch that was just accumulated."""
        self._num_batches += 1
        is_last = not trainer.fit_loop._should_accumulate()
        if self._each_batch or (is_last and self._data_parallel_size > 1):
            return  # the reducer passes it to before_average and after_average
        for parameter in (p for group in trainer.optimizers[0].param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            self.before_average(parameter, parameter.grad)
            if is_last:
                self.after_average(parameter, parameter.grad)
            else:
                self._before[id(parameter)] = _dense(parameter.grad).clone()

    def _reset(self) -> None:
        self._num_batches = 0
        self._before: dict[int, Tensor] = {}
        self._local: dict[int, Any] = {}
        self._total: dict[int, Tensor] = {}

    # --- the step ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that there are several single batches per step, whose gradients are seen before their average."""
        name = type(self).__name__
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ValueError(
                f"{name} needs automatic optimization of one optimizer, but {type(pl_module).__qualname__} has "
                f"automatic_optimization={pl_module.automatic_optimization} and {len(trainer.optimizers)} optimizers"
            )
        if self._mesh is None and trainer.world_size > 1:
            raise ValueError(
                f"{name} reads gradients before they are averaged, which {type(trainer.strategy).__qualname__} "
                'does not provide; use strategy="hybrid3d" or devices=1'
            )
        if self._data_parallel_size == 1 and trainer.accumulate_grad_batches == 1:
            raise ValueError(
                f"{name} needs more than one batch per step, but data_parallel_size = accumulate_grad_batches = 1; "
                "set Trainer(accumulate_grad_batches=2) or more"
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Updates the estimates."""
        self._measure(trainer, optimizer)

    def _measure(self, trainer: Trainer, optimizer: Optimizer) -> bool:
        """Updates the estimates; returns whether the gradients are finite, and there is an estimate."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # The gradients were recorded after the backward: times the loss scale, over accumulate_grad_batches.
        unscale = trainer.accumulate_grad_batches / (1.0 if scaler is None else scaler.get_scale())
        squares = self._squares(optimizer) * unscale**2
        num_batches = self._num_batches  # an epoch may end in the middle of an accumulation
        batches = num_batches * self._data_parallel_size
        self._reset()
        if not squares.isfinite().all():
            return False
        if batches > 1:
            self._update(squares[0], squares[1] / num_batches**2, batches)
        return len(self._weights) >= len(optimizer.param_groups)

    def _squares(self, optimizer: Optimizer) -> Tensor:
        """Returns [2, groups]: the sum of the squared norms of single batches, and the squared norm of the total."""
        rows = []
        for norms, owned in zip((self._local, self._total), self._owned, strict=True):
            row = []
            for group in optimizer.param_groups:
                terms = [norms[id(p)] for p in group["params"] if id(p) in norms and (owned is None or id(p) in owned)]
                row.append(sum(terms[1:], terms[0]) if terms else torch.zeros((), dtype=torch.float64))
            rows.append(row)
        # One transfer from the device for all.
        values = [value for row in rows for value in row]
        device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
        squares = torch.stack([value.to(device, torch.float64) for value in values]).view(2, -1)
        if self._mesh is not None:
            squares = squares.to(self._mesh.device_mesh.device_type)
            self._mesh.all_reduce(squares if self._each_batch else squares[0], "data")
            for axis in ("pp", "cp", "tp"):  # each parameter is counted on one of them
                self._mesh.all_reduce(squares, axis)
        return squares.cpu()

    def _update(self, local: Tensor, total: Tensor, batches: int) -> None:
        """Updates the moving averages (appendix B.3), without bias towards their first value, as in fairscale."""
        smoothing = max(1 - batches / 1000, 0.0) if self.smoothing is None else self.smoothing
        new = len(local) - len(self._weights)
        self._averages = torch.cat([self._averages, self._averages.new_zeros(2, new)], 1)
        self._weights = torch.cat([self._weights, self._weights.new_zeros(new)])
        scale = self.scale or float(batches)
        variance = torch.clamp((local / batches - total) / (batches - 1), min=_MIN_VARIANCE / scale)
        square = torch.clamp(total - (local / batches - total) / (batches - 1), min=0.0)
        self._averages = smoothing * self._averages + (1 - smoothing) * torch.stack([square, variance])
        self._weights = smoothing * self._weights + (1 - smoothing)

    def _debiased(self) -> Tensor:
        return self._averages / self._weights

    @property
    def _data_parallel_size(self) -> int:
        return 1 if self._mesh is None else self._mesh.size("data")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the moving averages."""
        return {"averages": self._averages.clone(), "weights": self._weights.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the moving averages of a checkpoint."""
        self._averages, self._weights = state_dict["averages"].clone(), state_dict["weights"].clone()


class AdaScale(GradientNoise):
    """Multiplies the learning rates by AdaScale's gain, in the optimizer's step only.

    The single batches are those of gradient accumulation and of the data-parallel ranks. Schedulers see the rates that
    they set; every parameter group has its own gain. The gain over all groups is logged as "adascale_gain". A step
    whose gradients are not finite is ignored.

    Args:
        scale: S, ratio of the batch size to the one that the learning rates were chosen for; by default
            data_parallel_size * accumulate_grad_batches.
        smoothing: weight of the past in the moving averages, 0 <= smoothing < 1; by default 1 - batches / 1000, where
            `batches` is the number of single batches per step.

    Raises:
        ValueError: a scale or smoothing outside its range.
    """

    def __init__(self, *, scale: float | None = None, smoothing: float | None = None) -> None:
        super().__init__(scale=scale, smoothing=smoothing)
        self._rates: list[float] | None = None

    def gains(self, scale: float) -> list[float]:
        """Returns the gain of every parameter group for a batch that is `scale` times as large."""
        return [_gain(square, variance, scale) for square, variance in zip(*self._debiased().tolist(), strict=True)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the gain can be estimated, and registers a hook after every step of the optimizer."""
        super().on_train_start(trainer, pl_module)
        self._step_hook = trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: self._restore(optimizer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the hook from the optimizer."""
        self._step_hook.remove()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Updates the estimates and scales the learning rates."""
        if not self._measure(trainer, optimizer):
            return
        scale = self.scale or float(self._data_parallel_size * trainer.accumulate_grad_batches)
        self._restore(optimizer)  # an optimizer may evaluate its closure more than once per step
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group, gain in zip(optimizer.param_groups, self.gains(scale), strict=True):
            group["lr"] = group["lr"] * gain
        square, variance = self._debiased().sum(1).tolist()
        pl_module.log("adascale_gain", _gain(square, variance, scale), on_step=True, on_epoch=False)

    def _restore(self, optimizer: Optimizer) -> None:
        if self._rates is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._rates = None


def _gain(square: float, variance: float, scale: float) -> float:
    """Returns the gain for a batch `scale` times as large, whose variance before averaging is `scale * variance`."""
    return (scale * variance + square) / (variance + square)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _square(gradient: Tensor) -> Tensor:
    return (
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).double().square()
    )
