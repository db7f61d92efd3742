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
            "activations", "loss", "gathered", "communication buffers", "optimizer step", "framework".
        capacity: Bytes of a device.
        reclaimable: For each pipeline rank, bytes of these that the allocator keeps for later and gives back before it
            fails: fragments, and the smaller one of what the backward and the optimizer's step take.
    """

    ranks: tuple[Mapping[str, float], ...]
    capacity: float = float("inf")
    reclaimable: tuple[float, ...] = ()

    @property
    def peak(self) -> float:
        """Bytes of the pipeline rank that holds most, where memory is not short."""
        return max(sum(rank.values()) for rank in self.ranks)

    @property
    def tensors(self) -> float:
        """Bytes of tensors alone of the rank that holds most of them, without what the framework takes."""
        return max(sum(rank.values()) - rank.get("framework", 0.0) for rank in self.ranks)

    @property
    def least(self) -> float:
        """Bytes with which a step still runs."""
        return max(sum(terms.values()) - self.spare(rank) for rank, terms in enumerate(self.ranks))

    def spare(self, rank: int) -> float:
        """Return the reclaimable bytes of a pipeline rank."""
        return self.reclaimable[rank] if self.reclaimable else 0.0

    @property
    def fits(self) -> bool:
        """Whether a step runs in the device's memory."""
        return self.least <= self.capacity
