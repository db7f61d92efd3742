"""GradientCompression: gradients are averaged over replicas in compressed form."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.callbacks.slow_links.callback_with_state_of_run import SlowLinkCallback
from lightning_hybrid.gradient_compression.low_precision import LowPrecision
from lightning_hybrid.gradient_compression.method import Method, Traffic
from lightning_hybrid.gradient_compression.power_sgd import PowerSGD
from lightning_hybrid.gradient_compression.quantized import Int8, OneBit
from lightning_hybrid.gradient_compression.top_k import TopK

MethodName = Literal["powersgd", "fp16", "bf16", "int8", "topk", "1bit"]
_METHODS = "powersgd", "fp16", "bf16", "int8", "topk", "1bit"


class GradientCompression(SlowLinkCallback):
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

    purpose = "GradientCompression sends gradients in compressed form"

    def __init__(
        self,
        method: MethodName = "powersgd",
        rank: int = 4,
        ratio: float = 0.01,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
    ) -> None:
        super().__init__()
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

    @property
    def description(self) -> str:
        """The line of the start table."""
        details = {"powersgd": f" of rank {self.rank}", "topk": f", {self.ratio:g} of the elements"}
        since = f", from step {self.start_step} on" if self.start_step else ""
        return f"gradients compressed over replicas: {self.method}{details.get(self.method, '')}{since}"

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
