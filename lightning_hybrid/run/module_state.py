"""State of the module on this rank: full or sharded, and its state dicts, as a single process would have them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_hybrid.checkpoint.full import (
    load_module_state,
    shard_loading_hook,
    state_mismatches,
)
from lightning_hybrid.checkpoint.local import LocalState
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.memory.free import free_bytes, free_on_host
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import temporary_hook
from lightning_hybrid.pipeline.stages.plan import unshard_parameters
from lightning_hybrid.run.connected import Optimization
from lightning_hybrid.run.optimizer_states import OptimizerStates, is_in_first_copy
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.standins.tensors import full_shape, is_absent
from lightning_hybrid.strategies.state.partial import (
    check_is_full,
    missing_parameters,
    refuse_partial_state,
)
from lightning_hybrid.strategies.world.ranks import RankWorld
from lightning_hybrid.text import sized

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.stages.plan import StagePlan


class Place(Enum):
    """Where the full parameters of a run that ends go; the first place that has room on every rank."""

    DEVICE = 0
    HOST = 1
    SHARDS = 2  # nowhere: the module stays as it is


def place_for(full: int, missing: int, num_processes: int, device: torch.device) -> Place:
    """Return where a rank has room for full parameters.

    ``full`` are the bytes of all parameters, ``missing`` those that other ranks have. Ranks of a node share its memory.
    """
    if device.type == "cpu":
        return Place.DEVICE if num_processes * missing < free_on_host() else Place.SHARDS
    if missing < free_bytes(device):
        return Place.DEVICE
    return Place.HOST if num_processes * full < free_on_host() else Place.SHARDS


class FullOrShardedState:
    """Whether the module is full on this rank or sharded, and its state dicts.

    Attributes:
        is_full: Whether this rank has all of the module.
        optimizers: The states of the optimizers of this fit, or of the one before.
        mesh: The ranks that parameters are sharded over.
    """

    def __init__(self, module: pl.LightningModule, world: RankWorld, optimizers: OptimizerStates | None = None) -> None:
        """Take the user's module, the ranks, and the states of optimizers that an earlier fit has left."""
        self._module, self._world = module, world
        self.optimizers = optimizers or OptimizerStates(module)
        self.optimizers.join(world)
        self.is_full = True
        self._failed = self._is_too_large = False
        self._run: Run | None = None
        self._plan: StagePlan | None = None
        self._shards, self.mesh = LocalShards(module, ()), world.mesh
        self._guard, self._until_full = contextlib.ExitStack(), contextlib.ExitStack()

    def follow(self, run: Run, optimization: Optimization) -> None:
        """Use the run and the optimization of a new layout."""
        self._run, self._plan, self._shards, self.mesh = run, run.plan, run.parts, run.mesh
        if run.setting.is_fitting:
            self.optimizers.follow(run, optimization)

    # -- full or sharded ----------------------------------------------------------------------------------------------

    def shard(self, parts: LocalShards) -> None:
        """Mark the module as sharded; its own ``state_dict()`` then refuses to emit empty tensors."""
        self.is_full = False
        self._refuse()
        if parts:
            hook = temporary_hook(self._module, shard_loading_hook(parts, self._module))
            self._until_full.callback(self._module.register_load_state_dict_pre_hook(hook).remove)

    def make_full(self, *, for_run: bool = True) -> None:
        """Gather the full module, and the states of its metrics, on every rank; collective.

        Where the run has ended (``for_run`` is False) and some device has no room for it, it is gathered in host
        memory; it stays in shards, with a warning, if that is short as well.
        """
        run = self._run
        self.share_metrics()
        if self.is_full or run is None or self._plan is None or self._failed or self._is_too_large:
            return
        self._world.progress.passes()
        self.optimizers.check_files()
        place = Place.DEVICE if for_run else self._place_for_full_module()
        if place is Place.SHARDS:
            self._is_too_large = True
            self._refuse()
            return
        device = torch.device("cpu") if place is Place.HOST else None
        run.parts.unshard_parameters(device=device)
        run.active.forget()
        unshard_parameters(self._plan, kept_on=device)
        run.setting.averages.unshard_parameters()
        self.is_full = True
        self._until_full.close()
        self._guard.close()

    def _place_for_full_module(self) -> Place:
        """Return where full parameters fit on every rank; collective."""
        with torch._C.DisableTorchFunction():
            sizes = [
                (math.prod(full_shape(p)), 0 if is_absent(p) else p.numel(), p.element_size())
                for p in self._module.parameters()
            ]
        full = sum(numel * size for numel, _, size in sizes)
        missing = full - sum(local * size for _, local, size in sizes)
        world = self._world
        place = place_for(full, missing, world.num_processes, world.device)
        worst = torch.tensor(place.value, device=world.device)
        place = Place(int(world.mesh.all_reduce(worst, "world", op="max")))
        if place is Place.SHARDS:
            rank_zero_warn(
                f"the full {type(self._module).__name__} has {sized(full)}, which neither each device nor the"
                f" host has room for ({world.num_processes} times, once per rank): this module stays in shards after"
                " the run; load it from a checkpoint"
            )
        return place

    def fail(self) -> None:
        """Join no further collectives: the run has failed, and the module stays as it is."""
        self._failed = True
        self.optimizers.fail()
        if not self.is_full:
            self._refuse()

    def _refuse(self) -> None:
        """Let the module's ``state_dict()`` raise."""
        self._guard.close()
        refusal = check_is_full if self._failed or self._is_too_large else refuse_partial_state
        handle = self._module.register_state_dict_pre_hook(temporary_hook(self._module, refusal))
        self._guard.callback(handle.remove)

    @property
    def has_failed(self) -> bool:
        """Whether the run has failed, so that no further collectives are joined."""
        return self._failed

    @property
    def can_be_moved(self) -> bool:
        """Whether the module can be moved to the host at the end; after a failure it may be in shards."""
        if not self._failed:
            return self.is_full
        is_built = not any(tensor.is_meta for tensor in (*self._module.parameters(), *self._module.buffers()))
        return self.is_full and is_built and not missing_parameters(self._module)

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[None]:
        """Let the state dict of a sharded module be read."""
        self._guard.close()
        try:
            yield
        finally:
            if not self.is_full:
                self._refuse()

    # -- the module ---------------------------------------------------------------------------------------------------

    @property
    def local_states(self) -> LocalState:
        """The local shards of the module and of optimizer states, by FQN."""
        return LocalState(self._module, self.mesh, self._plan, self._shards)

    @property
    def stages_per_rank(self) -> int:
        """Stages that each pipeline rank holds."""
        return 1 if self._plan is None else self._plan.stages_per_rank

    @property
    def stage_widths(self) -> list[int]:
        """Ranks of each stage; empty where each has one."""
        return [] if self._plan is None else list(self._plan.widths)

    def module_state(self) -> dict[str, Any]:
        """Gather the state dict of the full module on the first rank; collective."""
        self.share_metrics()
        if self.is_full:
            return self._module.state_dict()
        if self._world.is_disconnected:
            return {}
        self._world.rendezvous("trainer.save_checkpoint(...) or lightning_module_state_dict()")
        self.optimizers.check_files()
        with self.unguarded():
            return self.gathered()

    def gathered(self, copy: nn.Module | None = None) -> dict[str, Any]:
        """Gather the state dict of the sharded module, or of an average, sharded alike, on the first rank; collective.

        The ranks meet before.
        """
        if not is_in_first_copy(self._world):
            return {}
        return self.local_states.full_module(copy, keep=self._world.data_rank == 0)

    def share_metrics(self) -> None:
        """Broadcast the states of metrics that only one rank of a pipeline has; collective.

        The first rank then pickles metrics by itself, such as those in hyperparameters, and waits for no other.
        """
        if (
            self._run is not None
            and self._run.metrics is not None
            and not (self._failed or self._world.is_disconnected)
        ):
            self._run.metrics.broadcast_all_states()

    def load_module(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load a state dict of full tensors into this rank's shards.

        Raises:
            CheckpointError: Shapes differ.
        """
        if not self.is_full:
            with self.unguarded():
                load_module_state(self._module, state, self._shards, strict=strict)
            return
        try:
            self._module.load_state_dict(state, strict=strict)
        except RuntimeError:
            if differing := state_mismatches(self._module, state, self._shards, strict=strict):
                raise CheckpointError(differing, entry="other-model") from None
            raise
