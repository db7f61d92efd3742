"""Whether a step has layers enough for its stages, and uses them in the order of cuts, before ranks are started."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hybrid.errors import UnfitError
from lightning_hybrid.planning.costs import tensors_of_datasets
from lightning_hybrid.planning.plan import PlanRequest, make_plan
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.step.module_state.copies import copy_on_meta
from lightning_hybrid.strategies.hybrid3d import OPTION_DEFAULTS
from lightning_hybrid.strategies.options.options import Options

# What the number of stages, and the recorded batch, depend on.
_OPTIONS = (
    "pipeline_parallel_size",
    "stages_per_rank",
    "schedule",
    "stage_widths",
    "pipeline_cuts",
    "num_microbatches",
    "batch_splitter",
    "example_batch",
)


def check_stages(options: Options, module: pl.LightningModule, fit_arguments: Mapping[str, Any]) -> None:
    """Record the step of a copy, without storage for its parameters, and partition it.

    Raises:
        UnfitError: It has fewer layers than there are stages, or uses the modules of cuts in another order.
    """
    data = {name: value for name, value in fit_arguments.items() if name in ("train_dataloaders", "datamodule")}
    chosen = {name: value for name, value in options.changed(OPTION_DEFAULTS).items() if name in _OPTIONS}
    ranks = int(options.mesh_sizes["pipeline_parallel_size"])
    memo = {id(module._trainer): None, **tensors_of_datasets(module, list(data.values()))}
    request = PlanRequest(has_storage=False, describes=False)
    states = GeneratorStates(torch.device("cpu"))
    try:
        copied, data = copy_on_meta((module, data), only_parameters=True, memo=memo)
        make_plan(importlib.import_module(pl.__name__), copied, data, ranks, chosen, "32-true", request)
    except UnfitError:
        raise
    except Exception:  # of the user's code too: the run itself raises it, where its place is known
        pass
    finally:
        states.restore()
