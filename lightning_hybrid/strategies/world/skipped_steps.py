"""Skipped training steps: ``training_step`` returns None on all replicas; Lightning refuses that on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer import call

from lightning_hybrid.patching import replace


def allow_skipped_steps(trainer: Any) -> Callable[[], None]:
    """Let the loop accept None from the strategy, which checks that all replicas returned it; return the undo."""
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization

    def training_step(kwargs: dict[str, Any]) -> Any:
        """Lightning's own method, without its check of the world size."""
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return optimization.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)

    return replace(optimization, "_training_step", training_step, reason="skipped steps on several ranks")
