"""States of optimizers: sharded as in the last layout of the fit that made them, and full in files and pickles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.full import check_kind, check_state_shapes
from lightning_hybrid.checkpoint.local import LocalState
from lightning_hybrid.collectives.objects import broadcast_object
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import Replacement
from lightning_hybrid.precision.float32_step import drop_unused_masters, shard_masters
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.run.connected import Optimization
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.objects.tensors import on_host
from lightning_hybrid.strategies.world.ranks import RankWorld


class OptimizerStates:
    """The states of the optimizers of one fit.

    They stay sharded after it, so this stays too, through validations that hold the module in another way, until the
    next fit.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the module of the fit."""
        self._module = module
        self._failed = False
        self._run: Run | None = None
        self._optimization = Optimization()

    def join(self, world: RankWorld) -> None:
        """Use the ranks of a run, which has the process groups of the fit."""
        self._world = world

    def follow(self, run: Run, optimization: Optimization) -> None:
        """Use the run and the optimization of a new layout."""
        self._run, self._optimization = run, optimization

    def fail(self) -> None:
        """Join no further collectives: a run has failed."""
        self._failed = True

    def check_files(self) -> None:
        """Check that what is offloaded to files can be read, or raise an OffloadError."""
        for moved in self._optimization.moved:
            moved.check()

    @property
    def local_states(self) -> LocalState:
        """The local shards of the states, by FQN."""
        run = self._run
        plan, mesh = (None, self._world.mesh) if run is None else (run.plan, run.mesh)
        return LocalState(self._module, mesh, plan, self._shards)

    @property
    def _shards(self) -> LocalShards:
        return LocalShards(self._module, ()) if self._run is None else self._run.parts

    def full_state(self, optimizer: Optimizer, *, of_each_copy: bool = False) -> dict[str, Any]:
        """Gather the state dict of an optimizer on the first rank, or of each copy of the model; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        self.check_files()
        run = self._run
        is_full = run is None or run.plan is None or (run.plan.num_ranks == 1 and not run.parts)
        if is_full:
            return optimizer.state_dict()
        if self._world.is_disconnected:
            return {}
        self._world.rendezvous(f"trainer.save_checkpoint(...), with the state of {type(optimizer).__name__},")
        if not (of_each_copy or is_in_first_copy(self._world)):
            return {}
        keep = self._world.data_rank % self._world.layout.replicas_of_copy == 0
        return self.local_states.full_optimizer(optimizer, keep=keep)

    def full_states(self, optimizers: Sequence[Optimizer], *, of_each_copy: bool) -> list[dict[str, Any]]:
        """Return the full state dict of each optimizer on every rank, in host memory; collective over the world.

        Copies of the model have states of their own if ``of_each_copy``, and equal ones otherwise.
        """
        states = [map_leaves(on_host, self.full_state(each, of_each_copy=of_each_copy)) for each in optimizers]
        copies = self._ranks_of_copies if of_each_copy else [list(range(self._world.layout.world_size))]
        for ranks in copies:  # one after the other: only one of them is in memory besides that of this rank
            received = broadcast_object(states, source=min(ranks))
            if self._world.mesh.rank in ranks:
                states = received
        return states

    @property
    def _ranks_of_copies(self) -> list[list[int]]:
        """The ranks of the world by copy of the model."""
        layout = self._world.layout
        size = layout.replicas_of_copy
        copies: defaultdict[int, list[int]] = defaultdict(list)
        for rank in range(layout.world_size):
            copies[layout.data_rank(rank) // size].append(rank)
        return list(copies.values())

    def load(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Load each optimizer's state for the parameters of this rank, from full states or a distributed checkpoint.

        Raises:
            CheckpointError: States have other shapes than those of these optimizers.
        """
        from lightning_hybrid.checkpoint.read import SavedOptimizer

        made = self._optimization
        for optimizer, state in zip(optimizers, states, strict=False):  # before one of them sends anything
            self._check_shapes(optimizer, state)
        for optimizer, state in zip(optimizers, states, strict=False):
            if any(watched is optimizer for watched in made.watched):
                optimizer.load_state_dict(dict(state))
                shard_masters(optimizer, self._shards.shard_of_state)
            elif isinstance(state, SavedOptimizer):
                optimizer.load_state_dict(state.local_state(optimizer, self.local_states))
            else:
                optimizer.load_state_dict(self.local_states.shard_optimizer(optimizer, state))
            self._check_masters(optimizer)
            if not made.moved:
                _optimizer_to_device(optimizer, self._world.device)
        for moved in made.moved:
            moved.adopt()

    def _check_shapes(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        from lightning_hybrid.checkpoint.read import SavedOptimizer

        run, local = self._run, self.local_states
        is_sharded = run is not None and run.is_sharded
        entries = state.shapes(optimizer, local) if isinstance(state, SavedOptimizer) else state["state"]
        trainer_path = None if run is None else run.setting.trainer.ckpt_path
        path = state.path if isinstance(state, SavedOptimizer) else trainer_path
        check_kind(optimizer, state["param_groups"], entries, str(path or "the checkpoint"))
        check_state_shapes(optimizer, entries, local.names_of(optimizer), is_sharded=is_sharded)

    def _check_masters(self, optimizer: Optimizer) -> None:
        """Take loaded master weights out of the states of an optimizer that steps without them."""
        precision = None if self._run is None else self._run.setting.precision
        if isinstance(precision, HybridPrecision) and precision.master_weights:
            return
        if done := drop_unused_masters(optimizer):
            rank_zero_warn(
                f"the checkpoint has float32 master weights, which this run does not keep: {done}; set"
                " HybridPrecision('bf16-true', master_weights=True) to go on with them"
            )

    def pickle_in_full(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers be copied and pickled with full states, in hooks and after the run; collective."""
        for optimizer in optimizers:
            if hasattr(optimizer, "__getstate__"):
                state, original = partial(self._state_to_pickle, optimizer), optimizer.__getstate__
                # Not in the registry of patches: it stays after the run, which leaves shards of states.
                pickled = Replacement(optimizer, "__getstate__", state, original, reason="pickles hold full states")
                optimizer.__dict__["__getstate__"] = pickled

    def _state_to_pickle(self, optimizer: Optimizer) -> Any:
        local = type(optimizer).__getstate__(optimizer)
        run = self._run
        is_sharded = run is not None and run.is_sharded
        if not isinstance(local, dict) or "state" not in local or not is_sharded:
            return local
        if self._failed or self._world.is_disconnected:
            raise CheckpointError(
                f"{type(optimizer).__name__} is copied or pickled after a run that failed, and other ranks hold shards"
                " of its states; load a checkpoint",
                entry="optimizer-pickle",
            )
        with self._world.as_launcher(), torch._C.DisableTorchFunction():
            self._world.rendezvous(f"a copy or pickle of {type(optimizer).__name__}")
            states = broadcast_object(self.full_state(optimizer).get("state"))
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            full = type(local["state"])(dict) if isinstance(local["state"], defaultdict) else {}
            for key, entry in states.items():
                full[parameters[key] if isinstance(key, int) else key] = _on(self._world.device, entry)
        return {**local, "state": full}


def is_in_first_copy(world: RankWorld) -> bool:
    """Whether this rank holds a shard of the copy of the module that is written to files."""
    return world.data_rank < world.layout.replicas_of_copy


def _on(device: torch.device, value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() else leaf, value)
