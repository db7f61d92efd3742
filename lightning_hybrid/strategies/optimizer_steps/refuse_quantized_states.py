"""Refusals of optimizers with quantized states, where their states or options would not be those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.errors import QuantizedStatesError
from lightning_hybrid.optimizers.trial import has_low_bit_states
from lightning_hybrid.strategies.options.strategy_options import Options


def check_quantized_states(optimizers: Sequence[Optimizer], options: Options, *, is_sharded: bool) -> None:
    """Refuse what does not go with quantized states.

    Args:
        optimizers: Of the Trainer.
        options: Of the strategy.
        is_sharded: Whether parameters are sharded, so that owners step a few of them at a time.

    Raises:
        QuantizedStatesError: The states would be offloaded, are paged, or options belong to positions in groups.
    """
    for optimizer in optimizers:
        name, attributes = type(optimizer).__name__, vars(optimizer)
        if options.offloaded and has_low_bit_states(optimizer):
            raise QuantizedStatesError(
                f"offload={options.offload!r} moves the states of {name} between devices, but they are quantized; leave"
                " offload out, or use torch.optim.AdamW",
                entry="quantized-offload",
            )
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
