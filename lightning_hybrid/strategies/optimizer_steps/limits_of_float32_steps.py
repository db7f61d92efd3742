"""Limits of optimizer steps in float32 on bfloat16 parameters: what shards, offloads or reads them otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.optim import Optimizer

from lightning_hybrid.errors import PrecisionError
from lightning_hybrid.precision.hybrid import HybridPrecision


def check_random_rounding(
    precision: HybridPrecision, device: torch.device, offloaded: Collection[str], *, shards_manual_steps: bool
) -> None:
    """Refuse stochastic rounding where a step does not know which elements of a parameter it has.

    Args:
        precision: Of the run.
        device: The compute device.
        offloaded: Some of "parameters", "gradients" and "optimizer_states".
        shards_manual_steps: Whether the steps of optimizers that the module calls are sharded over replicas.

    Raises:
        PrecisionError: One does not.
    """
    if not precision.stochastic_rounding:
        return
    if shards_manual_steps:
        raise PrecisionError(
            "stochastic_rounding=True: zero_stage with manual optimization shards the steps of optimizers, which do not"
            " know the places of their elements; set zero_stage=0, or master_weights=True instead",
            entry="precision-rounding-places",
        )
    if "optimizer_states" in offloaded and device.type != "cpu":
        raise PrecisionError(
            f"stochastic_rounding=True: offload of optimizer states from {device} steps copies of parameters, which do"
            " not know the places of their elements; leave out the offload, or set master_weights=True instead",
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
