"""Limits of optimizer steps: float32 steps on bfloat16 parameters, and quantized states, that shards would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.errors import PrecisionError, QuantizedStatesError
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.strategies.options.options import Options


def check_random_rounding(precision: HybridPrecision, *, shards_manual_steps: bool) -> None:
    """Refuse stochastic rounding where a step does not know which elements of a parameter it has.

    Args:
        precision: Of the run.
        shards_manual_steps: Whether the steps of optimizers that the module calls are sharded over replicas.

    Raises:
        PrecisionError: One does not.
    """
    if precision.stochastic_rounding and shards_manual_steps:
        raise PrecisionError(
            "stochastic_rounding=True: zero_stage with manual optimization shards the steps of optimizers, which do not"
            " know the places of their elements; set zero_stage=0, or master_weights=True instead",
            entry="precision-rounding-places",
        )


def check_reads_of_stages(precision: object, watched: Sequence[Optimizer]) -> None:
    """Refuse steps in float32 of optimizers that may read parameters of other stages, which are bfloat16 there.

    Args:
        precision: The plugin of the run.
        watched: The optimizers whose steps may read parameters of other stages.

    Raises:
        PrecisionError: There is one, and parameters are stepped in float32.
    """
    own = [optimizer for optimizer in watched if not type(optimizer).step.__module__.startswith("torch.")]
    if own and isinstance(precision, HybridPrecision) and precision.steps_in_float32:
        name = type(own[0]).__name__
        raise PrecisionError(
            f"{name} may combine parameters of several stages in its step, and those of other stages are bfloat16; set"
            " pipeline_parallel_size=1, or give its class the attribute steps_parameters_independently=True if it steps"
            " each by itself, or leave out master_weights and stochastic_rounding",
            entry="precision-optimizer",
        )


def check_quantized_states(optimizers: Sequence[Optimizer], options: Options, *, is_sharded: bool) -> None:
    """Refuse what does not go with quantized states.

    Args:
        optimizers: Of the Trainer.
        options: Of the strategy.
        is_sharded: Whether parameters are sharded, so that owners step a few of them at a time.

    Raises:
        QuantizedStatesError: They are paged, or options belong to positions in groups.
    """
    for optimizer in optimizers:
        name, attributes = type(optimizer).__name__, vars(optimizer)
        if not is_sharded and not options.optimizer_in_backward:
            continue
        if attributes.get("is_paged"):
            raise QuantizedStatesError(
                f"{name} has paged states (is_paged=True), which are not gathered to the owners of sharded parameters;"
                " set is_paged=False",
                entry="quantized-paged",
            )
        overrides: Any = getattr(attributes.get("mng"), "index2config", None)
        if overrides:
            raise QuantizedStatesError(
                f"GlobalOptimManager overrides options of {len(overrides)} parameters of {name} by their positions in"
                " groups, but owners of sharded parameters step a few at a time; put these parameters into a group of"
                " their own, or into another optimizer",
                entry="quantized-overrides",
            )
