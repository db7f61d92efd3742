"""Sizes of "auto": the first rank plans before the ranks meet, and all take its plan, or its error."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import tuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_hybrid.errors import PlanError
from lightning_hybrid.memory.free import host_memory
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.predict.layout import number_format_of
from lightning_hybrid.step.standins.tensors import full_shape

if TYPE_CHECKING:
    from lightning_hybrid.predict.plans import Plan

_PACKAGE = __name__.partition(".strategies.")[0]
# Share of a device that parameters, gradients and states may take before a plan is looked for; activations need room.
_STATES_SHARE = 0.5


def needs_plan(strategy: Any) -> bool:
    """Tell whether the first rank looks for a plan: it is requested, or replicas are too large.

    They are where parameters, gradients and Adam's states take more than half of the device's memory. Where
    ``configure_model`` makes layers, the first rank counts them on a copy.
    """
    module = strategy.lightning_module
    trainer = None if module is None else module._trainer
    if trainer is None or trainer.state.fn is not TrainerFn.FITTING:
        return False
    if strategy.options.asks_for_plan:
        return True
    if HybridPrecision.is_other(strategy.precision_plugin):
        return False
    if is_overridden("configure_model", module, pl.LightningModule):
        return strategy.num_nodes * strategy.num_processes > 1  # else there is no layout to choose
    return not replicas_fit(strategy, module)


def replicas_fit(strategy: Any, module: Any) -> bool:
    """Tell whether a replica's parameters, gradients and states leave room for activations."""
    number_format = number_format_of(str(strategy.precision_plugin.precision))
    held = number_format.parameter + number_format.compute_copy
    frozen, nbytes = set(frozen_names(module)), 0.0
    for name, shape in parameter_shapes(module).items():
        trained = 0.0 if name in frozen else number_format.gradient + number_format.state
        nbytes += math.prod(shape) * (held + trained)
    return nbytes <= _STATES_SHARE * device_bytes(strategy)


def parameter_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each parameter that has one, by FQN."""
    return {name: full_shape(parameter) for name, parameter in module.named_parameters() if not is_lazy(parameter)}


def frozen_names(module: Any) -> list[str]:
    """Return the FQNs of parameters without gradients."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def device_bytes(strategy: Any) -> float:
    """Return the memory of this rank's device; on a CPU the host's memory, divided by the ranks of the node."""
    device = strategy.root_device
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() / strategy.num_processes


def plan_options(strategy: Any) -> tuple[dict[str, Any] | Exception, Plan | None]:
    """Return the options that "auto" sizes stand for, on the first rank; an error is for `agreed_plan` to raise.

    With them comes the plan; None where there is none.

    Where no plan is requested and no layout fits, the run goes on with a warning: predictions are some percent off.
    """
    # It derives a strategy from that of the user, and is above this folder.
    planning = importlib.import_module(f"{_PACKAGE}.planning.auto")
    try:
        found: tuple[dict[str, Any], Plan | None]
        found = planning.planned_options(strategy, strategy.lightning_module._trainer)
        return found
    except PlanError as error:
        if strategy.options.asks_for_plan:
            return error, None
        rank_zero_warn(f"hybrid3d: {error}; the run goes on with what is set, and may run out of memory")
        return {}, None
    except Exception as error:
        return error, None


def agreed_plan(planned: dict[str, Any] | Exception, rank: int) -> dict[str, Any]:
    """Return the first rank's plan on all ranks, over the store by which they met.

    Raises:
        Exception: That of the first rank's planning, on all ranks.
    """
    store = dist.distributed_c10d._get_default_store()
    key = f"hybrid3d/plan-{store.add(f'hybrid3d/plans-of-rank-{rank}', 1)}"  # the same number on every rank
    if rank == 0:
        store.set(key, pickle.dumps(planned))  # type: ignore[arg-type]  # takes bytes too
    agreed = pickle.loads(store.get(key))
    if isinstance(agreed, Exception):
        raise agreed
    found: dict[str, Any] = agreed
    return found


_CHECKS = (BatchSizeFinder.setup.__code__, tuning._check_scale_batch_size_configuration.__code__)
_MAX_FRAMES = 4  # from the check to here


def is_check_of_batch_size_search() -> bool:
    """Whether a search of the batch size checks now that the strategy is not distributed."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code in _CHECKS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
