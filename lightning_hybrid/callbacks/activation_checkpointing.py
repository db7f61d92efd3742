"""Activation checkpointing picked as a callback; `Hybrid3DStrategy(recompute=...)` is the same."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybrid.memory.recompute import Recompute, check_recompute


class ActivationCheckpointing(Callback):
    """Layers keep little for the backward and compute the rest again there; nothing in the module changes.

    Args:
        recompute: "full" or "selective" for all layers, or the share of bytes that selective ones keep; n for every
            n-th; names of layers, with wildcards; or a mapping of names to such policies or "keep".

    Raises:
        ValueError: It is none of these.
    """

    def __init__(self, recompute: Recompute = "full") -> None:
        check_recompute(recompute)
        self.recompute = recompute

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the strategy.

        Raises:
            TypeError: It is no strategy of this package.
        """
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "ask_to_recompute"):
            raise TypeError(
                f"ActivationCheckpointing needs a strategy of lightning_hybrid, and this is {type(strategy).__name__};"
                " set strategy='hybrid3d'"
            )
        strategy.ask_to_recompute(self.recompute)
