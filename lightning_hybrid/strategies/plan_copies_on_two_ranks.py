"""Why the planner gives a module no pipeline ranks: a copy of it is partitioned into two stages, as a run does."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.step.module_state.copy_on_meta import copy_on_meta
from lightning_hybrid.strategies.plan_in_one_process import MetaPlanningStrategy, make_plan
from lightning_hybrid.strategies.user_code.modules_unfit_for_stages import why_no_stages

_HOLDERS = (DataLoader, Dataset, pl.LightningDataModule, pl.LightningModule)


def why_not_in_two_stages(
    lightning: ModuleType, module: Any, fit_arguments: Mapping[str, Any], options: Mapping[str, Any], precision: str
) -> str:
    """Return why a module's step cannot be run in two stages; "" if it can, or if that cannot be told.

    Args:
        lightning: The namespace of the module.
        module: The user's module, which is copied without storage for its parameters.
        fit_arguments: Arguments of ``Trainer.fit``.
        options: Arguments of the strategy.
        precision: Lightning's name of the precision.
    """
    if reason := why_no_stages(module):
        return reason
    memo = tensors_of_datasets(module, list(fit_arguments.values()))
    try:
        copied, data = copy_on_meta((module, dict(fit_arguments)), only_parameters=True, memo=memo)
        in_stages = {**options, "pipeline_parallel_size": 2}
        strategy = make_plan(lightning, copied, data, 2, in_stages, precision, strategy_class=MetaPlanningStrategy)
    except Exception:  # of the user's code too, which the recording of costs raises
        return ""
    return strategy.why_no_stages


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
