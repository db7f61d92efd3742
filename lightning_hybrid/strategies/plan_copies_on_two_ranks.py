"""What a run on several ranks makes of a module, for the planner: copies of it are planned on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.parts.parameter_shard_placement import Replicated
from lightning_hybrid.step.module_state.copy_on_meta import copy_on_meta
from lightning_hybrid.strategies.plan_in_one_process import MetaPlanningStrategy, make_plan
from lightning_hybrid.strategies.run.run import Run
from lightning_hybrid.strategies.techniques.tensor import TensorParallel
from lightning_hybrid.strategies.user_code.hooks import why_no_stages
from lightning_hybrid.tensor.search.unit_search import plan_unit

_HOLDERS = (DataLoader, Dataset, pl.LightningDataModule, pl.LightningModule)


@dataclass(frozen=True)
class CopiesOnTwoRanks:
    """Plans copies of a module, without storage for its parameters, on two ranks.

    Attributes:
        namespace: That of Lightning to which the module belongs.
        module: The user's module.
        fit_arguments: Arguments of ``Trainer.fit``.
        options: Arguments of the strategy.
        precision: Lightning's name of the precision.
    """

    namespace: ModuleType
    module: Any
    fit_arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    precision: str

    def why_no_stages(self) -> str:
        """Return why the step cannot be run in two stages; "" if it can, or if that cannot be told."""
        if reason := why_no_stages(self.module):
            return reason
        plan = self._plan(pipeline_parallel_size=2)
        return "" if plan is None else plan.why_no_stages

    def sharded_parameters(self) -> frozenset[str] | None:
        """Return the FQNs of parameters that two tensor ranks shard; None if that cannot be told."""
        plan = self._plan(tensor_parallel_size=2, num_microbatches=1)
        if plan is None or plan.partition is None:
            return None
        run = plan.partition.run
        planner, shards = run.technique(TensorParallel), run.shards
        if shards is None and (planner is None or not planner.planned_calls.arguments):
            return None  # no call of a layer was recorded
        plans = {} if shards is None else shards.plans
        return frozenset(
            f"{unit}.{name}" if unit else name
            for unit, found in plans.items()
            for name, placement in found.placements.items()
            if not isinstance(placement, Replicated)
        )

    def _plan(self, **layout: int) -> _PlanWithoutMemory | None:
        memo = tensors_of_datasets(self.module, list(self.fit_arguments.values()))
        try:
            copied, data = copy_on_meta((self.module, dict(self.fit_arguments)), only_parameters=True, memo=memo)
            options = {**self.options, **layout}
            return make_plan(
                self.namespace, copied, data, 2, options, self.precision, strategy_class=_PlanWithoutMemory
            )
        except Exception:  # of the user's code too, which the recording of costs raises
            return None


class _PlanWithoutMemory(MetaPlanningStrategy):
    """Estimates no memory, and leaves layers unsharded whose plans are not proved on narrow copies."""

    _find_tensor_plan = staticmethod(partial(plan_unit, at_full_width=False))

    def _record(self, run: Run) -> None:
        pass

    def _describe(self, run: Run, recorded: Assignment | None) -> None:
        pass


def tensors_of_datasets(*holders: Any) -> dict[int, Any]:
    """Return tensors and arrays of datasets, by their identity as `copy.deepcopy` notes what is copied.

    They are read alone, and may take as much memory as there is.

    Args:
        holders: Loaders, data sets, modules and data modules, or collections of these.
    """
    found: dict[int, Any] = {}
    known, open_ = set[int](), [(holder, True) for holder in holders]
    while open_:
        values, is_data = open_.pop()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor | numpy.ndarray):
                if is_data:
                    found[id(leaf)] = leaf
            elif isinstance(leaf, _HOLDERS) and id(leaf) not in known:
                known.add(id(leaf))
                open_.append((vars(leaf), isinstance(leaf, DataLoader | Dataset)))
    return found
