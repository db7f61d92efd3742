"""Callback that enables activation checkpointing; `Hybrid3DStrategy(recompute=...)` is equivalent."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybrid.memory.recompute.policies import Recompute, check_recompute


class ActivationCheckpointing(Callback):
    """Enables activation checkpointing of layers; the module itself is not changed.

    Args:
        recompute: "full" or "selective" for all layers, or the share of bytes that selective ones save; n for every
            n-th; names of layers, with wildcards, or classes; a mapping of these to such policies or "keep"; or a
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
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "request_recomputation"):
            raise TypeError(
                "ActivationCheckpointing needs a strategy of lightning_hybrid, and the Trainer has"
                f" {type(strategy).__name__}; set strategy='hybrid3d'"
            )
        strategy.request_recomputation(self.recompute)
