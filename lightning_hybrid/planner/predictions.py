"""What the planner predicts of one layout: `PredictedTime` and `PredictedMemory`, with the terms they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PredictedTime:
    """Seconds of one optimizer step.

    Attributes:
        seconds: The total.
        terms: Its parts by name, in seconds: "computation", "recomputation", "bubble", "tensor ranks", "context ranks",
            "expert ranks", "pipeline messages", "replicas", "optimizer", "host", "kernel starts".
        samples: Samples of the step over all replicas.
        flops_per_rank: Floating-point operations of forward and backward of one rank, without recomputation.
    """

    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    samples: int = 1
    flops_per_rank: float = 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput over all ranks."""
        return self.samples / self.seconds


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes at the peak of a step.

    Attributes:
        ranks: For each pipeline rank, its parts in bytes by name: "parameters", "gradients", "optimizer states",
            "activations", "loss", "gathered", "communication buffers", "framework".
        capacity: Bytes of a device.
    """

    ranks: tuple[Mapping[str, float], ...]
    capacity: float = float("inf")

    @property
    def peak(self) -> float:
        """Bytes of the pipeline rank that holds most."""
        return max(sum(rank.values()) for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the device's memory."""
        return self.peak <= self.capacity
