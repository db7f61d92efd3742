"""Tensor parallelism in a strategy: plan units in the first recorded step, shard and describe them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch import nn

from lightning_hybrid.errors import LayoutError, TensorPlanError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.strategies.techniques.tensor_plans import (
    check_is_sharded,
    check_sequence_sharding,
    warn_of_full_sequences,
)
from lightning_hybrid.tensor.discovery.unit_calls_and_outside_reads import UnitCalls, record_calls
from lightning_hybrid.tensor.discovery.vocabulary_uses import VocabularyUses, WeightUse
from lightning_hybrid.tensor.plan.unit_plan import SequenceParallel, UnitPlan
from lightning_hybrid.tensor.requests.plan_requests_by_unit import requests_by_unit
from lightning_hybrid.tensor.requests.read_transformers_tp_plan import requests_of_model
from lightning_hybrid.tensor.requests.user_plan import Request, requests_of_user
from lightning_hybrid.tensor.runtime.sharded_model import ShardedModel
from lightning_hybrid.tensor.search.model_search import plan_units
from lightning_hybrid.tensor.search.plan_cache import PlanCache
from lightning_hybrid.tensor.search.prove_branch import lines_of_branch
from lightning_hybrid.tensor.search.unit_search import NOT_SEARCHED, plan_unit


class TensorPlanner:
    """Plans the units of one full module while its first step is recorded.

    ``plan`` is the user's (pattern -> style), ``folder`` that of cached plans, if any; ``find`` plans one unit. A
    pattern that matches nothing raises a TensorPlanError, on every rank.

    Attributes:
        summary: Where the plans came from; on the first rank.
        planned_calls: The calls of the units for which the plans were found.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        sequence_parallel: bool,
        plan: Mapping[str, str] | None = None,
        folder: str | None = None,
        find: Callable[..., UnitPlan] | None = None,
    ) -> None:
        self._module, self._mesh = module, mesh
        self._size, self._context = mesh.size("tp"), mesh.size("cp")
        self._sequence_parallel: SequenceParallel = "tensor" if sequence_parallel else None
        self._user_requests: dict[str, Request] = {}
        self._model_requests: dict[str, Request] = {}
        if self._size > 1:  # plans say how weights are cut
            self._user_requests, self._model_requests = requests_of_user(module, plan or {}), requests_of_model(module)
        self._folder, self._find = folder, find or plan_unit
        self.summary = ""
        self._calls = self.planned_calls = UnitCalls()
        self._units: dict[str, nn.Module] = {}
        self._watched: Collection[nn.Module] = ()
        self._read_by_step: dict[str, str] = {}
        self._uses: dict[str, WeightUse] = {}

    @contextlib.contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """Observe the units while the step is recorded inside."""
        units = variant.recording.units
        self._units, self._watched = find_layers(units), list(units.values())
        self._read_by_step |= variant.recording.parameters_read_outside()
        with record_calls(self._units, units) as self._calls:
            uses = VocabularyUses(self._module, self._units, self._calls.running)
            with uses:
                yield
        if self._size > 1:
            self._uses = uses.uses

    def plan(self, with_experts: bool = False) -> ShardedModel:
        """Find the plans on the first rank, and broadcast them; collective over the world.

        ``with_experts`` means that experts may be sharded besides: their planner checks that something is sharded.

        Raises:
            LayoutError: Nothing of the module can be sharded; on every rank.
            TensorPlanError: The user's plan cannot be followed, or is not proved; on every rank.
            RuntimeError: The search failed; on every rank.
        """
        box: list[Any] = [None]
        if self._mesh.rank == 0:
            try:
                box[0] = self._planned(with_experts)
            except TensorPlanError as error:
                box[0] = error
            except Exception as error:
                box[0] = f"{type(error).__name__}: {error}"
                if self._mesh.layout.world_size == 1:
                    raise
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], TensorPlanError):
            raise box[0]
        if isinstance(box[0], str):
            sizes = f"tensor_parallel_size={self._size} and context_parallel_size={self._context}"
            raise RuntimeError(f"no plan for {sizes} was found: {box[0]}")
        self.planned_calls, self._calls = self._calls, UnitCalls()
        self._check(box[0], with_experts)
        if self._sequence_parallel:
            warn_of_full_sequences(box[0], self._size)
        groups = self._mesh.group("tp"), self._mesh.group("cp")
        return ShardedModel(self._module, box[0], *groups, self._mesh.places("cp"), lines_of_branch)

    def _check(self, plans: Mapping[str, UnitPlan], with_experts: bool) -> None:
        if self._size > 1 and not with_experts:
            check_is_sharded(plans, self._size)
        if self._context > 1:
            check_sequence_sharding(plans, self._size, self._context)

    def _planned(self, with_experts: bool) -> dict[str, UnitPlan]:
        cache = None if self._folder is None else PlanCache(self._folder)
        plans = self._searched(self._find if cache is None else cache.find)
        if any(NOT_SEARCHED in reason for plan in plans.values() for reason in plan.replicated_reasons.values()):
            try:
                self._check(plans, with_experts)
            except LayoutError:  # which a run may not raise
                return self._searched(plan_unit)
        if cache is not None:
            self.summary = f"plans of layers: {cache.summary(cache.save())}"
        return plans

    def _searched(self, find: Callable[..., UnitPlan]) -> dict[str, UnitPlan]:
        return plan_units(
            self._module,
            self._units,
            self._calls,
            self._read_by_step,
            self._size,
            find,
            self._sequence_parallel,
            self._context,
            requests_by_unit(self._module, self._units, self._user_requests, self._model_requests),
            self._uses,
            self._watched,
        )


def plan_folder(trainer: Any) -> str | None:
    """Return the folder of cached plans; None if this run keeps no files, or none on a disk.

    That is the checkpoint folder that the user set. Where Lightning makes one for each run, below a logger's folder
    with a version, it is the folder of all versions.
    """
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
    if not folders or trainer.fast_dev_run:
        return None
    folder = os.fspath(folders[0])
    if trainer.loggers:
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        of_all_runs = os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name))
        if os.path.normpath(folder) == os.path.normpath(os.path.join(of_all_runs, version, "checkpoints")):
            folder = of_all_runs
    return folder if _is_local_file_protocol(folder) else None
