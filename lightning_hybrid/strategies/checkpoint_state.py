"""The state of a module in parts: as one process would save it, and back."""

from __future__ import annotations

import abc
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
from lightning_hybrid.checkpoint.single_file import (
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    misfits,
    own_optimizer_state,
    parts_instead,
)
from lightning_hybrid.full_params.cross_stage_mode import GlobalReads
from lightning_hybrid.parts.local_shards import HeldParts
from lightning_hybrid.patching import replace, temporary_hook
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.strategies.logs.epoch_metrics import EpochMetrics
from lightning_hybrid.strategies.mesh_strategy import MeshStrategy
from lightning_hybrid.strategies.start.callback_checks import refuse_callbacks, search_by_mean_loss
from lightning_hybrid.strategies.start.empty_init import EmptyStart
from lightning_hybrid.strategies.start.initial_sync import check_gathered, check_left_whole, left_elsewhere
from lightning_hybrid.strategies.state.weight_averaging import Averages
from lightning_hybrid.strategies.user_code.checkpoint_hooks import tensors_kept_by
from lightning_hybrid.strategies.user_code.hook_reads import HookReads
from lightning_hybrid.strategies.world.rank_failures import Failures, check_connections, warn_of_missing_checkpoint
from lightning_hybrid.tensor.runtime.sharded_model import ModelShards
from lightning_hybrid.zero.optimizer_states.offloaded_states import StatesAtRest
from lightning_hybrid.zero.optimizer_states.sharded_step import SharedSteps


class StagedStrategy(MeshStrategy):
    """A strategy whose ranks hold stages of the module: Lightning's questions about state are about the whole."""

    def __init__(self, **options: Any) -> None:
        """Args: options: as ``MeshStrategy``."""
        super().__init__(**options)
        self._plan: StagePlan | None = None
        self._shards: ModelShards | None = None
        self._parts: HeldParts | None = None
        self._is_whole = True
        self._failed = False
        self._failures: Failures | None = None
        self._guard: RemovableHandle | None = None
        self._loads_parts: RemovableHandle | None = None
        self._seed: int | None = None
        self._empty: EmptyStart | None = None
        self._averages: Averages | None = None
        self._reads: GlobalReads | None = None
        self._hook_reads: HookReads | None = None
        self._offloaded: list[StatesAtRest] = []
        self._stepped: list[SharedSteps] = []  # of a module that calls its optimizers itself
        self._pickle_as_they_are = contextlib.ExitStack()  # when closed
        self._watched: list[Optimizer] = []  # whose steps follow the parameters of other ranks too

    @property
    def plan(self) -> StagePlan | None:
        """Which stage holds what; None while no step was recorded."""
        return self._plan

    @property
    def shards(self) -> ModelShards | None:
        """How the tensor ranks share each layer; None where they do not."""
        return self._shards

    @property
    def parts(self) -> HeldParts | None:
        """What this rank holds of each parameter; None where it holds all of those that are here."""
        return self._parts

    def setup_environment(self) -> None:
        """Join the world, and watch over its ranks from then on."""
        self._failed, self._is_whole, self._guard, self._loads_parts = False, True, None, None
        check_connections()
        super().setup_environment()
        trainer = self._connected_trainer
        self._failures = None
        if trainer is not None:
            refuse_callbacks(trainer, self.layout, is_recorded=self._needs_runner())
        if trainer is not None and self.layout.world_size > 1:
            self._failures = Failures(trainer, self.mesh, self._timeout or default_pg_timeout)
            self._changed_loops.callback(self._failures.stop_watching)
            self._changed_loops.callback(EpochMetrics(trainer).leave)

    @abc.abstractmethod
    def _needs_runner(self) -> bool:
        """Whether steps run from a recording, and not as the module's own."""

    def on_train_start(self) -> None:
        """Let searches decide alike on all ranks."""
        assert self.lightning_module is not None
        search_by_mean_loss(self.lightning_module.trainer, self.mesh)

    @property
    def _cut_off(self) -> bool:
        return self._failures is not None and self._failures.cut_off

    @property
    def _leaves_whole(self) -> bool:
        module = self.lightning_module
        if module is None or not self._failed:
            return self._is_whole
        is_built = not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        return self._is_whole and is_built and not left_elsewhere(module)

    def _has_failed(self) -> bool:
        return self._failures is not None and self._failures.any_reported()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, unless one of them has failed and will not come."""
        if not self._cut_off:
            super().barrier(name)

    def _passes(self) -> None:
        """Say that this rank goes on to something that others take part in."""
        if self._failures is not None:
            self._failures.rendezvous.passes()

    def _meet(self, what: str) -> None:
        """Make sure that all ranks are about to do this."""
        if self._failures is not None:
            timeout = self._timeout or default_pg_timeout
            self._failures.rendezvous.meet(what, timeout, self._failures.any_reported)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Tensors are built on the right device in the right dtype; with ``empty_init`` parameters hold no storage."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().tensor_init_context(empty_init=False))
            if empty_init:
                self._empty = self._empty or EmptyStart(self.root_device)
                stack.enter_context(self._empty.building())
            yield

    def _adopt_empty(self) -> EmptyStart | None:
        """Who knows the initial values of what the module holds on the meta device; None if it holds nothing there."""
        module = self.lightning_module
        assert module is not None
        if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            self._empty = self._empty or EmptyStart(self.root_device)
            self._empty.adopt(module)
        return self._empty

    def _in_parts(self, module: nn.Module) -> None:
        """From now on the module is not whole; its own ``state_dict()`` refuses to emit empty tensors."""
        self._is_whole = False
        self._guard = _guarded(module, check_gathered)
        if self._parts is not None:
            hook = temporary_hook(module, parts_instead(self._parts, module))
            self._loads_parts = module.register_load_state_dict_pre_hook(hook)

    @contextlib.contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Let this file read the state dict of a module in parts."""
        module, guard = self.lightning_module, self._guard
        assert module is not None
        if guard is not None:
            guard.remove()
        try:
            yield
        finally:
            if guard is not None:
                refusal = check_left_whole if self._failed else check_gathered
                self._guard = _guarded(module, refusal)

    @property
    def _in_first_copy(self) -> bool:
        """Whether this rank holds a part of the copy of the module that is written to files."""
        layout = self.layout
        return self.data_rank < max(layout.data_shard_size, layout.expert_replicas)

    def make_whole(self) -> None:
        """Give every rank the whole module again; collective."""
        if self._is_whole or self._plan is None or self._failed:
            return
        self._passes()
        self._check_files()
        if self._reads is not None:
            kept = tensors_kept_by([self.lightning_module, *self._connected_trainer.callbacks])
            self._reads.complete([tensor for tensor in kept if id(tensor) not in self._reads.parameters])
        if self._parts is not None:
            self._parts.make_whole()
        if self._shards is not None:
            self._shards.forget()
        self._plan.make_whole()
        if self._averages is not None:
            self._averages.make_whole()
        self._is_whole = True
        if self._loads_parts is not None:
            self._loads_parts.remove()
            self._loads_parts = None
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _check_files(self) -> None:
        """See that what is offloaded to files can be read.

        Raises:
            OffloadError: A file was cut off.
        """
        for offloaded in self._offloaded:
            offloaded.check()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole module on the first rank; collective."""
        assert self.lightning_module is not None
        if self._is_whole or self._plan is None:
            return self.lightning_module.state_dict()
        if self._cut_off:
            return {}
        self._meet("trainer.save_checkpoint(...) or lightning_module_state_dict()")
        self._check_files()
        with self._unguarded():
            if not self._in_first_copy:
                return {}
            return gather_module_state(self.lightning_module, self._plan, self._parts, keep=self.data_rank == 0)

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """The state dict of a copy of the module, in parts as it is, as a checkpoint has it; collective."""
        assert self._plan is not None
        if not self._in_first_copy:
            return {}
        return gather_module_state(copy, self._plan, self._parts, is_copy=True, keep=self.data_rank == 0)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict into what this rank holds."""
        assert self.lightning_module is not None
        if self._is_whole:
            check_left_whole(self.lightning_module)
            self._adopt_empty()
            try:
                self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
            except RuntimeError as error:
                if differing := misfits(self.lightning_module, checkpoint["state_dict"], strict=strict):
                    raise CheckpointError(differing) from error
                raise
        else:
            with self._unguarded():
                load_module_state(self.lightning_module, checkpoint["state_dict"], self._parts, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer over all pipeline ranks, on the first; collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        self._check_files()
        for stepped in self._stepped:
            if stepped.optimizer is optimizer:
                return {} if self._cut_off else stepped.whole_state()
        if self._plan is None or (self._plan.num_ranks == 1 and self._parts is None):
            return optimizer.state_dict()
        if self._cut_off:
            return {}
        if not self._in_first_copy:
            return {}
        return gather_optimizer_state(optimizer, self._plan, self._parts, keep=self.data_rank == 0)

    def _pickle_in_full(self) -> None:
        """Let optimizers be copied and pickled with full states, in hooks and after the run; collective."""
        self._pickle_as_they_are = contextlib.ExitStack()
        for optimizer in self.optimizers:
            if hasattr(optimizer, "__getstate__"):
                undo = replace(optimizer, "__getstate__", partial(self._state_to_pickle, optimizer))
                self._pickle_as_they_are.callback(undo)

    def _state_to_pickle(self, optimizer: Optimizer) -> Any:
        own = type(optimizer).__getstate__(optimizer)
        in_shards = any(stepped.optimizer is optimizer for stepped in self._stepped) or self._parts is not None
        if not isinstance(own, dict) or "state" not in own or not (in_shards or self._has_stages):
            return own
        if self._failed or self._cut_off:
            raise CheckpointError(
                f"{type(optimizer).__name__} is copied or pickled after a run that failed, and other ranks hold shards"
                " of its states; load a checkpoint"
            )
        with self.launcher_world(), torch._C.DisableTorchFunction():
            self._meet(f"a copy or pickle of {type(optimizer).__name__}")
            box = [_on(torch.device("cpu"), self.optimizer_state(optimizer).get("state"))]
            dist.broadcast_object_list(box, src=0)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            full = type(own["state"])(dict) if isinstance(own["state"], defaultdict) else {}
            for key, entry in box[0].items():
                full[parameters[key] if isinstance(key, int) else key] = _on(self.root_device, entry)
        return {**own, "state": full}

    @property
    def _has_stages(self) -> bool:
        return self._plan is not None and self._plan.num_ranks > 1

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's state for the parameters of this rank."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if any(watched is optimizer for watched in self._watched):
                optimizer.load_state_dict(dict(state))
                if self._reads is not None:
                    self._reads.adopt_state(optimizer.state)
            else:
                optimizer.load_state_dict(self._own_state(optimizer, state))
            if not self._offloaded:
                _optimizer_to_device(optimizer, self.root_device)
        for stepped in self._stepped:
            stepped.cut_states()
        for offloaded in self._offloaded:
            offloaded.adopt()

    def _own_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank keeps of the state of an optimizer."""
        return own_optimizer_state(optimizer, state, self._parts)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the file on the first rank; the seed of keyed randomness goes with it where there may be any."""
        if self._cut_off and not self._is_whole:
            warn_of_missing_checkpoint(filepath)
            return
        own = {"hybrid3d": {"seed": self._seed}} if self.layout.world_size > 1 or self._needs_runner() else {}
        super().save_checkpoint({**checkpoint, **own}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file on every rank; a resumed run draws what the saved one would have drawn."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._seed = checkpoint.get("hybrid3d", {}).get("seed", self._seed)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        """Ranks that failed take no further part in collectives; the others learn why."""
        super().on_exception(exception)
        self._failed = True
        if self._guard is not None:  # the module stays in parts
            assert self.lightning_module is not None
            self._guard.remove()
            self._guard = _guarded(self.lightning_module, check_left_whole)
        self._shown_world.close()
        if self._failures is not None:
            self._failures.report(exception)


def _guarded(module: nn.Module, refusal: Callable[..., None]) -> RemovableHandle:
    """Let the module's ``state_dict()`` refuse, until the handle is removed."""
    return module.register_state_dict_post_hook(temporary_hook(module, refusal))


def _on(device: torch.device, value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and leaf.dim() else leaf, value)
