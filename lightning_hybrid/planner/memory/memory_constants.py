"""The constants of the memory model, the same for all models, layouts and hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryConstants:
    """What a device holds besides what the sums of tensors give.

    Attributes:
        fragmentation: Bytes that the allocator reserves but no tensor takes, relative to those that tensors take.
        loss_gradients: Gradients of the logits held at once: of the loss and of its softmax.
        reclaimed: Share of the fragments that the allocator gives back when memory is short.
        bucketed: Elements of gradients in the buckets of reductions over replicas; of fewer gradients, half of them.
    """

    fragmentation: float = 0.12
    loss_gradients: float = 2.0
    reclaimed: float = 0.7
    bucketed: float = 1e9


CONSTANTS = MemoryConstants()
