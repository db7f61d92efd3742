"""Tensor and context parallelism: layers are planned in the first recorded step, sharded over ranks, and run so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_hybrid.errors import LayoutError, TensorPlanError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.step.objects.modules import find_layers, lines_of_layers
from lightning_hybrid.strategies.logs.phases import phase
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.techniques.technique import Active, Technique
from lightning_hybrid.techniques.tensor_plans import (
    check_is_even,
    check_is_sharded,
    check_sequence_sharding,
    warn_across_nodes,
    warn_of_full_sequences,
)
from lightning_hybrid.tensor.plan import SequenceParallel, UnitPlan
from lightning_hybrid.tensor.region import KeyedDraws
from lightning_hybrid.tensor.runtime.model import ShardedModel
from lightning_hybrid.tensor.search.cache import PlanCache, lines_of_branch
from lightning_hybrid.tensor.search.model import ModelSearch
from lightning_hybrid.tensor.search.requests import Request, requests_by_unit, requests_of_model, requests_of_user
from lightning_hybrid.tensor.search.unit import NOT_SEARCHED, plan_unit
from lightning_hybrid.tensor.search.uses import UnitCalls, VocabularyUses, WeightUse, record_calls


class TensorParallel(Technique):
    """Tensor and context ranks share layers; each layer is planned while the first step is recorded.

    Attributes:
        summary: Where the plans came from; on the first rank.
        planned_calls: The calls of the units for which the plans were found.
        shards: How this rank runs its shard of each layer, once it is placed.
    """

    records = True
    shares_layers = True

    def __init__(self, module: nn.Module, mesh: Mesh, options: Options, folder: str | None = None) -> None:
        """Begins without plans.

        Args:
            module: The full module.
            mesh: The ranks.
            options: Of the strategy, with the user's plan; a pattern that matches nothing raises a TensorPlanError, on
                every rank.
            folder: Of cached plans, if there are any.
        """
        self._module, self._mesh = module, mesh
        self._size, self._context = mesh.size("tp"), mesh.size("cp")
        self._sequence_parallel: SequenceParallel = "tensor" if options.sequence_parallel else None
        self._is_strict = options.strict_layout
        self._user_requests: dict[str, Request] = {}
        self._model_requests: dict[str, Request] = {}
        if self._size > 1:  # plans say how weights are cut
            self._user_requests = requests_of_user(module, options.tensor_parallel_plan or {})
            self._model_requests = requests_of_model(module)
        self._folder, self._find = folder, plan_unit
        self.summary = ""
        self.shards: ShardedModel | None = None
        self._calls = self.planned_calls = UnitCalls()
        self._units: dict[str, nn.Module] = {}
        self._watched: Collection[nn.Module] = ()
        self._read_by_step: dict[str, str] = {}
        self._uses: dict[str, WeightUse] = {}

    @classmethod
    def of(cls, run: Any) -> TensorParallel:
        """Make it for a run over several tensor or context ranks."""
        setting, world = run.setting, run.setting.world
        warn_across_nodes(setting.layout.tensor_parallel_size, world.num_processes, world.num_nodes)
        folder = plan_folder(setting.trainer) if world.mesh.rank == 0 else None  # the first plans for all
        return cls(setting.module, world.mesh, setting.options, folder)

    @property
    def plans(self) -> Mapping[str, UnitPlan]:
        """How layers are sharded."""
        return {} if self.shards is None else self.shards.plans

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

    def place(self, run: Any, earlier: Sequence[AxisSharding]) -> Sequence[AxisSharding]:
        """Find the plans on the first rank, and broadcast them; collective over the world.

        Another technique may shard layers over tensor ranks besides: it checks that something is sharded.

        Raises:
            LayoutError: Nothing of the module can be sharded; on every rank.
            TensorPlanError: The user's plan cannot be followed or is not proved, or a layer does not divide under
                ``strict_layout``; on every rank.
            RuntimeError: The search failed; on every rank.
        """
        others_shard = any(each.shares_layers for each in run.techniques if each is not self)
        box: list[Any] = [None]
        if self._mesh.rank == 0:
            try:
                box[0] = self._planned(others_shard)
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
        self._check(box[0], others_shard)
        if self._is_strict:
            check_is_even(box[0], self._size)
        if self._sequence_parallel:
            warn_of_full_sequences(box[0], self._size)
        groups = self._mesh.group("tp"), self._mesh.group("cp")
        self.shards = ShardedModel(self._module, box[0], *groups, self._mesh.places("cp"), lines_of_branch)
        return self.shards.shardings

    def find_with(self, find: Any) -> None:
        """Search plans of layers by another function than ``plan_unit``."""
        self._find = find

    def build(self, run: Any, owner: Any) -> Active:
        """Connect the layers of this rank to random numbers, and code outside of them to gathered parameters."""
        shards = self.shards
        if shards is None:
            return Active()
        shards.be_ready(partial(KeyedDraws, device=run.setting.device), rank_zero_warn, run.randomness.uncounted)
        meet = partial(run.setting.world.rendezvous, compares=False)
        ranks = HookAgreement(run.mesh.group("tp"), run.setting.device, meet, "tensor")
        shards.gather_on_read(run.runner.guards, ranks, run.names_over("ep"))
        if (runner := run.plain_runner) is not None:
            runner.gather_outputs(any(plan.vocabulary or plan.positions for plan in shards.plans.values()))
        return _Shards(shards)

    def details(self, run: Any) -> list[str]:
        """Return the plan of each layer; layers with equal plans share lines."""
        lines = lines_of_layers({fqn: plan.lines() for fqn, plan in self.plans.items()})
        return [*lines, *self.summary.splitlines()] if self.plans else []

    def _check(self, plans: Mapping[str, UnitPlan], others_shard: bool) -> None:
        if self._size > 1 and not others_shard:
            check_is_sharded(plans, self._size)
        if self._context > 1:
            check_sequence_sharding(plans, self._size, self._context)

    def _planned(self, others_shard: bool) -> dict[str, UnitPlan]:
        cache = None if self._folder is None else PlanCache(self._folder)
        plans = self._searched(self._find if cache is None else cache.find)
        if any(NOT_SEARCHED in reason for plan in plans.values() for reason in plan.replicated_reasons.values()):
            try:
                self._check(plans, others_shard)
            except LayoutError:  # which a run may not raise
                return self._searched(plan_unit, "searching tensor plans at full width")
        if cache is not None:
            self.summary = f"how to split layers: {cache.summary(cache.save())}"
        return plans

    def _searched(self, find: Callable[..., UnitPlan], what: str = "searching tensor plans") -> dict[str, UnitPlan]:
        options = {"sequence_parallel": self._sequence_parallel, "context": self._context}
        names = {
            id(unit): f"layer {number} of {len(self._units)}, {fqn}"
            for number, (fqn, unit) in enumerate(self._units.items(), 1)
        }
        with phase(what) as searching:

            def find_plan(unit: nn.Module, *args: Any, **more: Any) -> UnitPlan:
                searching.at(names[id(unit)])
                return find(unit, *args, **options, **more)

            return ModelSearch(
                self._module,
                self._units,
                self._calls,
                self._read_by_step,
                self._size,
                find_plan,
                plan_requests=requests_by_unit(self._module, self._units, self._user_requests, self._model_requests),
                uses=self._uses,
                step_units=self._watched,
            ).plans()


class _Shards(Active):
    """The layers of this rank, while they run."""

    keeps_compiled = True

    def __init__(self, shards: ShardedModel) -> None:
        self._shards = shards

    def running(self) -> AbstractContextManager[None]:
        """Run layers sharded inside."""
        return self._shards.running()

    def around_step(self) -> AbstractContextManager[Any]:
        """Gather what code outside of layers reads."""
        return self._shards.outside_reads()

    def forget(self) -> None:
        """Drop what is known of local shards."""
        self._shards.forget()


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
    return os.path.join(folder, ".hybrid3d") if _is_local_file_protocol(folder) else None
