"""A budget by operations; and where that is not enough, by whole layers.

A layer that is recorded has all of its results in memory as its forward ends, and a layer that is repeated as a whole
has not: it takes less than the floor of recorded layers. So a budget below that floor is tried again with the choice of
`BudgetedCompiledLayers`, by which a layer keeps what autograd saves, or is repeated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.budget.budgeted_layers import BudgetedLayers
from lightning_hybrid.memory.budget.compiled_layers import BudgetedCompiledLayers, Forward
from lightning_hybrid.memory.selective_activation_checkpointing import ParameterGatherer


class BudgetedOperationsOrLayers(BudgetedLayers):
    """Chooses what each layer keeps, or which layers are repeated as a whole."""

    def __init__(self, device: torch.device, budget: Callable[[int], int], name: str = "recompute") -> None:
        """Begin at the floor of recorded layers; arguments as of `BudgetedLayers`."""
        super().__init__(device, budget, name)
        self._by_layer = BudgetedCompiledLayers(device, budget, name)
        self._refusal: RecomputeError | None = None  # of the choice by operations: layers are chosen from then on

    def choosing(
        self,
        forward: Forward,
        fqn: str,
        checkpointed: Callable[[Forward], Forward],
        gatherer: ParameterGatherer | None = None,
    ) -> Forward:
        """Wrap the forward of a layer; ``checkpointed`` wraps one so that it is repeated in the backward."""
        by_operation, by_layer = self.wrap(forward, fqn, gatherer), self._by_layer.choosing(forward, fqn, checkpointed)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (by_operation if self._refusal is None else by_layer)(*args, **kwargs)

        return run

    @property
    def wants_profile(self) -> bool:
        """Whether the next batch should be profiled."""
        return super().wants_profile if self._refusal is None else self._by_layer.wants_profile

    def begin_batch(self, tensors: Iterable[Tensor], other_bytes: int | None = None) -> None:
        """Profile a batch, as `BudgetedLayers.begin_batch` with tensors of any shape."""
        if self._refusal is None:
            super().begin_batch(tensors, other_bytes)
        else:
            self._by_layer.begin_batch(tensors, other_bytes)

    def begin_optimizer_step(self) -> None:
        """Begin what comes after the backwards of a batch that is profiled."""
        if self._refusal is None:
            super().begin_optimizer_step()
        else:
            self._by_layer.begin_optimizer_step()

    def end_batch(self, *, has_stepped: bool) -> bool:
        """End a batch; return whether choices were made.

        Raises:
            RecomputeError: The budget is below the floor of layers that are repeated as a whole.
        """
        if self._refusal is None:
            try:
                return super().end_batch(has_stepped=has_stepped)
            except RecomputeError as error:
                self._refusal = error
                return False
        try:
            has_chosen = self._by_layer.end_batch(has_stepped=has_stepped)
        except RecomputeError as error:
            raise (error if self._by_layer.least <= self.least else self._refusal) from None
        self.report, self.plans = self._by_layer.report, self._by_layer.plans
        return has_chosen

    def close(self) -> None:
        """Leave the batch that is profiled, if there is one."""
        super().close()
        self._by_layer.close()
