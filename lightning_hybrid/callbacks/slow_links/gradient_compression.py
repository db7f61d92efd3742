"""GradientCompression: gradients are averaged over replicas in compressed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_hybrid.gradient_compression.low_precision import LowPrecision
from lightning_hybrid.gradient_compression.method import Method, Traffic
from lightning_hybrid.gradient_compression.power_sgd import PowerSGD
from lightning_hybrid.gradient_compression.quantized import Int8, OneBit
from lightning_hybrid.gradient_compression.top_k import TopK

MethodName = Literal["powersgd", "fp16", "bf16", "int8", "topk", "1bit"]
Gather = Callable[[Optimizer], dict[str, Any]]
_METHODS = "powersgd", "fp16", "bf16", "int8", "topk", "1bit"


class ConnectedState(Protocol):
    """State of a run that checkpoints have: tensors of parameters by FQN, and other values."""

    def save(self, gather: Gather | None = None) -> dict[str, Any]:
        """Return the state as a checkpoint has it; collective.

        ``gather`` returns the state dict of an optimizer in full; as the strategy saves it if None.
        """


class GradientCompression(Callback):
    """Sends gradients over the data-parallel axes in compressed form.

    What a message leaves out is added to the next one (error feedback), except for "fp16" and "bf16". Vectors, such as
    biases, are sent as they are; "fp16" and "bf16" send all in that dtype. Logs "gradient_bytes", the bytes that the
    first rank sends in a step to average gradients, and "gradient_compression", how many times more the gradients take.

    Args:
        method: "powersgd", factors of low rank (Vogels et al., arXiv 1905.13727); "fp16" and "bf16", half precision;
            "int8", 8 bits per element; "topk", the largest elements (Stich et al., arXiv 1809.07599); "1bit", signs and
            their mean magnitude (Seide et al. 2014; Tang et al., arXiv 2102.02888).
        rank: Of the factors of "powersgd".
        ratio: Share of the elements that "topk" sends.
        start_step: The first optimizer step, counted from 0, whose gradients are compressed.
        min_compression_rate: "powersgd" sends a matrix as it is unless factors make it smaller by more than that.
        warm_start: Whether "powersgd" begins with the factors of the last step.

    Raises:
        ValueError: An unknown method, or a number outside of its range.
    """

    def __init__(
        self,
        method: MethodName = "powersgd",
        rank: int = 4,
        ratio: float = 0.01,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
    ) -> None:
        if method not in _METHODS:
            raise ValueError(f"GradientCompression({method!r}): the method must be one of {', '.join(_METHODS)}")
        if rank < 1:
            raise ValueError(f"GradientCompression(rank={rank}): the factors have at least rank 1")
        if not 0 < ratio <= 1:
            raise ValueError(f"GradientCompression(ratio={ratio}): the share of elements is above 0 and at most 1")
        if start_step < 0:
            raise ValueError(f"GradientCompression(start_step={start_step}): steps are counted from 0")
        self.method, self.rank, self.ratio, self.start_step = method, rank, ratio, start_step
        self.min_compression_rate, self.warm_start = min_compression_rate, warm_start
        self.traffic = Traffic()
        self.loaded: dict[str, Any] = {}
        self._state: ConnectedState | None = None
        self._before = 0.0, 0.0

    def make_method(self) -> Method:
        """Make the method that this callback names."""
        if self.method == "powersgd":
            rate, warm = self.min_compression_rate, self.warm_start
            return PowerSGD(self.traffic, self.rank, min_compression_rate=rate, warm_start=warm)
        if self.method == "topk":
            return TopK(self.traffic, self.ratio)
        if self.method in ("fp16", "bf16"):
            return LowPrecision(self.traffic, torch.float16 if self.method == "fp16" else torch.bfloat16)
        return Int8(self.traffic) if self.method == "int8" else OneBit(self.traffic)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the run."""
        return {**self.__dict__, "_state": None}

    def connect(self, state: ConnectedState) -> None:
        """Save this state in checkpoints from now on; the strategy calls it."""
        self._state = state

    @property
    def description(self) -> str:
        """The line of the start table."""
        details = {"powersgd": f" of rank {self.rank}", "topk": f", {self.ratio:g} of the elements"}
        since = f", from step {self.start_step} on" if self.start_step else ""
        return f"gradients compressed over replicas: {self.method}{details.get(self.method, '')}{since}"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that a strategy compresses gradients."""
        if self._state is None and trainer.world_size > 1:
            raise ValueError(
                f"GradientCompression sends gradients in compressed form, which {type(trainer.strategy).__qualname__}"
                ' does not; use strategy="hybrid3d"'
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the bytes of the step, if it has averaged gradients."""
        now = self.traffic.sent, self.traffic.uncompressed
        sent, uncompressed = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        if sent:
            pl_module.log("gradient_bytes", sent, on_step=True, on_epoch=False)
            pl_module.log("gradient_compression", uncompressed / sent, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the feedback, summed over replicas, and the factors of PowerSGD."""
        return self.loaded if self._state is None else self._state.save()

    def carry(self, gather: Gather, broadcast: Callable[[Any], Any]) -> None:
        """Keep the state for another layout of the same run; collective."""
        if self._state is not None:
            self.loaded = broadcast(self._state.save(gather))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, which the next run uses."""
        self.loaded = state_dict
