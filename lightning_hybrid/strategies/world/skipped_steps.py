"""Skipped training steps: None on all replicas, as in one process; Lightning refuses it beyond that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer import call

from lightning_hybrid.patching import replace


def allow_skipped_steps(trainer: Any) -> Callable[[], None]:
    """Let the optimization loop take None from the strategy, which has seen to it that all replicas returned it.

    Args:
        trainer: About to fit.

    Returns:
        What undoes it.
    """
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization

    def training_step(kwargs: dict[str, Any]) -> Any:
        """Lightning's own, without its look at the world size."""
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return optimization.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)

    return replace(optimization, "_training_step", training_step, reason="skipped steps on several ranks")
