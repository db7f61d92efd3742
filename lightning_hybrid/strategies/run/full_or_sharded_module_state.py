"""State of the module on this rank: full or sharded, and its state dicts, as a single process would have them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.checkpoint.full_module_and_optimizer_state import (
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    local_optimizer_state,
    shard_loading_hook,
    state_mismatches,
)
from lightning_hybrid.checkpoint.owned_shards_and_local_states import LocalState
from lightning_hybrid.checkpoint.read_checkpoint_folder import SavedOptimizer
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.shard_and_unshard_parameters import LocalShards
from lightning_hybrid.patching import Replacement, temporary_hook
from lightning_hybrid.pipeline.stages.drop_broadcast_parameters_and_buffers import unshard_parameters
from lightning_hybrid.precision.float32_step import drop_unused_masters, shard_masters
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.strategies.run.run_and_optimization_dataclasses import Optimization, Run
from lightning_hybrid.strategies.start.empty_init import EmptyInit
from lightning_hybrid.strategies.state.refuse_partial_state_dict import (
    check_is_full,
    missing_parameters,
    refuse_partial_state,
)
from lightning_hybrid.strategies.user_code.gather_checkpoint_hook_tensors import attribute_tensors
from lightning_hybrid.strategies.world.rank_world_and_collectives import RankWorld


class FullOrShardedState:
    """Whether the module is full on this rank or sharded, and its state dicts.

    Attributes:
        is_full: Whether this rank has all of the module.
    """

    def __init__(self, module: pl.LightningModule, world: RankWorld) -> None:
        self._module, self._world = module, world
        self.is_full = True
        self._failed = False
        self._run: Run | None = None
        self._optimization = Optimization()
        self._guard: RemovableHandle | None = None
        self._loads_shards: RemovableHandle | None = None
        self._unpickled = contextlib.ExitStack()  # when closed, optimizers pickle the local shards of their states

    def follow(self, run: Run, optimization: Optimization) -> None:
        """Use the run and the optimization of a new layout."""
        self._run, self._optimization = run, optimization

    # -- full or sharded ----------------------------------------------------------------------------------------------

    def shard(self, parts: LocalShards | None) -> None:
        """Mark the module as sharded; its own ``state_dict()`` then refuses to emit empty tensors.

        ``parts`` is None if this rank has full parameters of its stages.
        """
        self.is_full = False
        self._guard = _guarded(self._module, refuse_partial_state)
        if parts is not None:
            hook = temporary_hook(self._module, shard_loading_hook(parts, self._module))
            self._loads_shards = self._module.register_load_state_dict_pre_hook(hook)

    def make_full(self) -> None:
        """Gather the full module on every rank; collective."""
        run = self._run
        if self.is_full or run is None or run.plan is None or self._failed:
            return
        self._world.passes()
        self.check_files()
        if run.global_reads is not None:
            reads = run.global_reads
            kept = attribute_tensors([self._module, *self._module.trainer.callbacks])  # type: ignore[attr-defined]
            reads.complete([tensor for tensor in kept if id(tensor) not in reads.parameters])
        if run.parts is not None:
            run.parts.unshard_parameters()
        if run.shards is not None:
            run.shards.forget()
        unshard_parameters(run.plan)
        run.setting.averages.unshard_parameters()
        self.is_full = True
        for handle in (self._loads_shards, self._guard):
            if handle is not None:
                handle.remove()
        self._loads_shards = self._guard = None

    def fail(self) -> None:
        """Join no further collectives: the run has failed, and the module stays as it is."""
        self._failed = True
        if self._guard is not None:
            self._guard.remove()
            self._guard = _guarded(self._module, check_is_full)

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
        if self._guard is None:
            yield
            return
        self._guard.remove()
        try:
            yield
        finally:
            self._guard = _guarded(self._module, check_is_full if self._failed else refuse_partial_state)

    def check_files(self) -> None:
        """Check that what is offloaded to files can be read.

        Raises:
            OffloadError: A file was cut off.
        """
        for offloaded in self._optimization.offloaded:
            offloaded.check()

    # -- the module ---------------------------------------------------------------------------------------------------

    @property
    def local_states(self) -> LocalState:
        """The local shards of the module and of optimizer states, by FQN."""
        run = self._run
        plan, parts = (None, None) if run is None else (run.plan, run.parts)
        return LocalState(self._module, self.mesh, plan, parts)

    @property
    def mesh(self) -> Mesh:
        """The ranks that parameters are sharded over."""
        return self._world.mesh if self._run is None else self._run.mesh

    @property
    def stages_per_rank(self) -> int:
        """Stages that each pipeline rank holds."""
        return 1 if self._run is None or self._run.plan is None else self._run.plan.stages_per_rank

    def module_state(self) -> dict[str, Any]:
        """Gather the state dict of the full module on the first rank; collective."""
        self.share_metrics()
        if self.is_full or self._run is None or self._run.plan is None:
            return self._module.state_dict()
        if self._world.is_disconnected:
            return {}
        self._world.rendezvous("trainer.save_checkpoint(...) or lightning_module_state_dict()")
        self.check_files()
        with self.unguarded():
            if not self.is_in_first_copy:
                return {}
            keep = self._world.data_rank == 0
            return gather_module_state(self._module, self._run.plan, self._run.parts, keep=keep)

    def share_metrics(self) -> None:
        """Broadcast the states of metrics that only one rank of a pipeline has; collective.

        The first rank then pickles metrics by itself, such as those in hyperparameters, and waits for no other.
        """
        if self._run is not None and self._run.metrics is not None and not self._world.is_disconnected:
            self._run.metrics.broadcast_all_states()

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """Gather the state dict of an average of the weights, which is sharded as the module is; collective."""
        assert self._run is not None and self._run.plan is not None
        if not self.is_in_first_copy:
            return {}
        keep = self._world.data_rank == 0
        return gather_module_state(copy, self._run.plan, self._run.parts, is_copy=True, keep=keep)

    @property
    def is_in_first_copy(self) -> bool:
        """Whether this rank holds a shard of the copy of the module that is written to files."""
        layout = self._world.layout
        return self._world.data_rank < _data_ranks_of_copy(layout)

    def load_module(self, state: Mapping[str, Any], empty: Callable[[], EmptyInit | None], *, strict: bool) -> None:
        """Load a state dict of full tensors into this rank's shards; ``empty`` adopts a module without storage.

        Raises:
            CheckpointError: Shapes differ.
        """
        if not self.is_full:
            parts = None if self._run is None else self._run.parts
            with self.unguarded():
                load_module_state(self._module, state, parts, strict=strict)
            return
        check_is_full(self._module)
        empty()
        try:
            self._module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            if differing := state_mismatches(self._module, state, strict=strict):
                raise CheckpointError(differing, entry="other-model") from error
            raise

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer, *, of_each_copy: bool = False) -> dict[str, Any]:
        """Gather the state dict of an optimizer on the first rank, or on that of each copy of the model; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        self.check_files()
        run = self._run
        stepped = next((each for each in self._optimization.sharded_steps if each.optimizer is optimizer), None)
        is_full = run is None or run.plan is None or (run.plan.num_ranks == 1 and run.parts is None)
        if stepped is None and is_full:
            return optimizer.state_dict()
        if self._world.is_disconnected:
            return {}
        self._world.rendezvous(f"the state of {type(optimizer).__name__}")
        if stepped is not None:
            return stepped.full_state()
        if not (of_each_copy or self.is_in_first_copy):
            return {}
        assert run is not None and run.plan is not None
        keep = self._world.data_rank % _data_ranks_of_copy(self._world.layout) == 0
        return gather_optimizer_state(optimizer, run.plan, run.parts, keep=keep)

    @property
    def ranks_of_copies(self) -> list[list[int]]:
        """The ranks of the world by copy of the model."""
        layout = self._world.layout
        size = _data_ranks_of_copy(layout)
        copies: defaultdict[int, list[int]] = defaultdict(list)
        for rank in range(layout.world_size):
            copies[layout.data_rank(rank) // size].append(rank)
        return list(copies.values())

    def load_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Load each optimizer's state for the parameters of this rank, from full states or a distributed checkpoint."""
        made, run = self._optimization, self._run
        for optimizer, state in zip(optimizers, states, strict=False):
            if any(watched is optimizer for watched in made.watched):
                optimizer.load_state_dict(dict(state))
                if run is not None and run.parts is not None:
                    shard_masters(optimizer, run.parts.shard_of_state)
                if run is not None and run.global_reads is not None:
                    run.global_reads.track_state(optimizer.state)
            elif isinstance(state, SavedOptimizer):
                optimizer.load_state_dict(state.local_state(optimizer, self.local_states))
            else:
                parts = None if run is None else run.parts
                optimizer.load_state_dict(local_optimizer_state(optimizer, state, parts))
            self._check_masters(optimizer)
            if not made.offloaded:
                _optimizer_to_device(optimizer, self._world.device)
        for stepped in made.sharded_steps:
            stepped.shard_states()
        for offloaded in made.offloaded:
            offloaded.adopt()

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
        self._unpickled = contextlib.ExitStack()
        for optimizer in optimizers:
            if hasattr(optimizer, "__getstate__"):
                state, original = partial(self._state_to_pickle, optimizer), optimizer.__getstate__
                # Not in the registry of patches: it stays after the run, which leaves shards of states.
                pickled = Replacement(optimizer, "__getstate__", state, original, reason="pickles hold full states")
                optimizer.__dict__["__getstate__"] = pickled
                self._unpickled.callback(pickled.put_back)

    def pickle_shards(self) -> None:
        """Let optimizers be copied and pickled as they are."""
        self._unpickled.close()

    def _state_to_pickle(self, optimizer: Optimizer) -> Any:
        local = type(optimizer).__getstate__(optimizer)
        run = self._run
        is_sharded = any(stepped.optimizer is optimizer for stepped in self._optimization.sharded_steps)
        if run is not None:
            is_sharded |= run.parts is not None or (run.plan is not None and run.plan.num_ranks > 1)
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
            box = [_on(torch.device("cpu"), self.optimizer_state(optimizer).get("state"))]
            dist.broadcast_object_list(box, src=0)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            full = type(local["state"])(dict) if isinstance(local["state"], defaultdict) else {}
            for key, entry in box[0].items():
                full[parameters[key] if isinstance(key, int) else key] = _on(self._world.device, entry)
        return {**local, "state": full}


def _data_ranks_of_copy(layout: ParallelLayout) -> int:
    """Number of ranks with data that hold shards of one copy of the module."""
    return max(layout.data_shard_size, layout.expert_replicas)


def _guarded(module: nn.Module, refusal: Callable[..., None]) -> RemovableHandle:
    """Let the module's ``state_dict()`` raise, until the handle is removed."""
    return module.register_state_dict_post_hook(temporary_hook(module, refusal))


def _on(device: torch.device, value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() else leaf, value)
