"""Checkpoints on disk as Lightning's hooks see them: one file of the first rank, or a folder of all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_hybrid.checkpoint import folder
from lightning_hybrid.checkpoint.background import BackgroundSave
from lightning_hybrid.checkpoint.local import OwnedShards, unsharded
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.layout import AXES
from lightning_hybrid.patching import replace
from lightning_hybrid.randomness.generators import plain_generator_states, restore_plain_states
from lightning_hybrid.run.module_state import FullOrShardedState
from lightning_hybrid.run.setting import needs_runner
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.world.failures import warn_of_missing_checkpoint
from lightning_hybrid.strategies.world.ranks import RankWorld

if TYPE_CHECKING:
    from lightning_hybrid.checkpoint.write import HostBuffers

# Lightning's name for what it saves before it asks SLURM for the job's return: it must be there by then.
_BEFORE_REQUEUE = "hpc_ckpt"


class CheckpointFiles:
    """Saves and loads the checkpoints of one module; folders and single files load in the same way.

    Attributes:
        seed: Of keyed randomness, from the checkpoint that was loaded; None if none was.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self._background = BackgroundSave()
        self._reading_shards = contextlib.ExitStack()  # when closed, Lightning's checkpoints read full states
        self._buffers: HostBuffers | None = None  # of the run, once it saves beside training
        self._is_connected = False
        self._writers: tuple[Any, ProcessGroup | None] | None = None
        self._generator_states: list[dict[str, Any]] = []  # by replica, what a resumed run's generators had drawn

    def connect(
        self, module: pl.LightningModule, world: RankWorld, state: FullOrShardedState, options: Options
    ) -> None:
        """Bind to one run: its module, ranks and state, and its options, which are planned by now."""
        self._module, self._world, self._state, self._options = module, world, state, options
        self._is_connected = True

    def adopt_seed(self, seed: int) -> int:
        """Return the seed of the loaded checkpoint, or of an earlier run; the agreed one if there is none."""
        self.seed = seed if self.seed is None else self.seed
        return self.seed

    def check(self, checkpoint_io: Any) -> None:
        """Check that folders can be written, and let Lightning read local shards for them.

        Raises:
            ValueError: The user has a ``CheckpointIO``, or links to the last checkpoint.
        """
        if not self._options.save_distributed_checkpoint:
            return
        if type(checkpoint_io) not in (type(None), TorchCheckpointIO):
            raise ValueError(
                f"save_distributed_checkpoint=True writes folders by itself, but {type(checkpoint_io).__name__}"
                " was given to write files; leave out one of them"
            )
        for callback in self._model_checkpoints() if self._options.async_checkpoint else ():
            if callback.save_last == "link":
                raise ValueError(
                    f"{type(callback).__name__}(save_last='link') links to a checkpoint that async_checkpoint=True is"
                    " still writing, so a kill would leave a link to nothing; set save_last=True, whose checkpoint is"
                    " replaced when the new one is complete"
                )
        connector = self._module.trainer._checkpoint_connector
        # Other callers of `lightning_module_state_dict()` mean full tensors.
        reads, why = "_get_lightning_module_state_dict", "each rank writes its own shards"
        self._reading_shards.close()
        self._reading_shards.callback(replace(connector, reads, self.local_state, reason=why))

    # -- states -------------------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        """Return the state dict of the module, with the local shard (``OwnedShards``) of each tensor."""
        state = self._state
        state.share_metrics()
        if not state.is_full:
            if self._world.is_disconnected:
                return {}
            self._world.rendezvous("trainer.save_checkpoint(...)")
            state.optimizers.check_files()
        with state.unguarded(), torch._C.DisableTorchFunction():
            # The module's own method may leave something out, or add to it.
            return self._divided(self._module.state_dict()) if state.is_full else state.local_states.module()

    def _divided(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the full module with what this rank may have to write of each tensor."""
        local, divided = self._state.local_states.tensors(), dict(full)
        for name, value in full.items():
            if isinstance(value, Tensor):
                shards = local.get(name)
                divided[name] = shards if _is_same_tensor(value, shards) else unsharded(value, counts=self._is_first)
        return divided

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """Return the state dict of a copy of the module, sharded as the module is, as a checkpoint has it."""
        if self._options.save_distributed_checkpoint:
            return self._state.local_states.module(copy)
        return self._state.gathered(copy)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as a checkpoint has it: local shards by FQN, or all on the first rank."""
        if not self._options.save_distributed_checkpoint:
            return self._state.optimizers.full_state(optimizer)
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        self._state.optimizers.check_files()
        with torch._C.DisableTorchFunction():
            return self._state.optimizers.local_states.optimizer(optimizer)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any, save_file: Callable[..., None]
    ) -> None:
        """Write a folder, each rank its own bytes, or one file by Lightning's own ``save_file`` on the first rank.

        Raises:
            TypeError: ``storage_options`` are passed for a folder.
            CheckpointError: It cannot be written; or the one before it could not.
        """
        saves_folder = self._options.save_distributed_checkpoint
        if not saves_folder and self._is_first and folder.is_folder(path) and folder.is_checkpoint(Path(path)):
            folder.remove(Path(path))
        if self._world.is_disconnected and not self._state.is_full:
            warn_of_missing_checkpoint(path)
            return
        layout = self._world.layout
        is_keyed = saves_folder or layout.world_size > 1 or needs_runner(self._options, layout)
        own = {"seed": self.seed, "layout": self._axis_sizes()}
        state = {**checkpoint, **({"hybrid3d": own} if is_keyed else {})}
        if saves_folder:
            self._save_folder(state, path, storage_options)
        else:
            save_file(state, path, storage_options)

    def _save_folder(self, state: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if storage_options is not None:
            raise TypeError("save_checkpoint(storage_options=...) is for a CheckpointIO, which writes no folders")
        if "://" in str(filepath):
            raise CheckpointError(
                f"{filepath} is not local, and distributed checkpoints are; set save_distributed_checkpoint=False, or"
                " save to a folder that all ranks share and copy it",
                entry="save-local",
            )
        from lightning_hybrid.checkpoint.write import HostBuffers, prepare, write

        world = self._world
        with world.as_launcher(), torch._C.DisableTorchFunction():
            path = Path(os.path.abspath(world.broadcast(os.fspath(filepath))))
            self.wait()
            waited_for = path.name.startswith(_BEFORE_REQUEUE) or self._is_first_named_last(path)
            is_running = self._module.trainer.state.status == TrainerStatus.RUNNING
            beside = self._options.async_checkpoint and is_running and not world.broadcast(waited_for)
            if beside and self._buffers is None:
                self._buffers = HostBuffers()
            buffers = self._buffers if beside else None
            drawn = plain_generator_states(world.device)
            if self._state.is_full and isinstance(state.get("state_dict"), Mapping):  # after a run it is one of tensors
                state["state_dict"] = self._divided(state["state_dict"])
            mesh, description = self._state.mesh, self._metadata(state)
            save = prepare(state, path, mesh, description, buffers=buffers, generators=drawn)
            if not beside or save.error is not None:
                write(save, self._group)
                return
            if self._is_first and not path.exists():
                path.mkdir(parents=True)  # the name is taken: a search for a free one must see it
            self._background.start(save, self._group)

    @property
    def _is_first(self) -> bool:
        return self._world.mesh.rank == 0

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        return [c for c in self._module.trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]

    def _is_first_named_last(self, path: Path) -> bool:
        """Whether ``ckpt_path="last"`` would find the checkpoint being written, and no other.

        If its name were taken by an empty folder, that would be found after a kill, and refused at each restart.
        """
        names = {callback.CHECKPOINT_NAME_LAST for callback in self._model_checkpoints()}
        return any(path.name.startswith(name) for name in names) and not path.exists()

    @property
    def _group(self) -> ProcessGroup | None:
        """A process group of all ranks for the writer threads only."""
        if self._writers is None or self._writers[0] is not self._world.mesh:
            self._writers = self._world.mesh, self._world.mesh.dedicated_world()
        return self._writers[1]

    def _metadata(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        packages = {"lightning_hybrid": "lightning-hybrid", "torch": "torch"}
        versions = {name: _version(package) for name, package in packages.items()}
        return {
            "layout": self._axis_sizes(),
            "versions": {**versions, "lightning": checkpoint.get("pytorch-lightning_version")},
            "step": checkpoint.get("global_step"),
            "epoch": checkpoint.get("epoch"),
        }

    def _axis_sizes(self) -> dict[str, int]:
        return {**self._world.layout.by_axis, "stages_per_rank": self._state.stages_per_rank}

    def wait(self, *, on_error: Callable[[str], None] | None = None) -> None:
        """Wait until the checkpoint being written is complete; an error is raised, or passed to ``on_error``."""
        self._background.wait(on_error=on_error)

    def remove(self, filepath: Any, remove_file: Callable[[Any], None]) -> None:
        """Remove a checkpoint, after the one being written is complete, or by Lightning's own ``remove_file``."""
        if "://" in str(filepath) or not (self._background.is_writing or folder.is_folder(filepath)):
            remove_file(filepath)
        elif self._is_first:
            self._background.remove(Path(os.path.abspath(filepath)))

    def close(self) -> None:
        """Wait for the checkpoint being written at the end of a run."""
        self._buffers = None
        self.wait()
        ends_in_shards = self._is_connected and not (self._state.is_full or self._state.has_failed)
        if not ends_in_shards:  # else checkpoints after the run are of shards too
            self._reading_shards.close()

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, path: Any, weights_only: bool | None, load_file: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Read a folder on every rank, or a file by ``load_file``; a resumed run draws what the saved one would.

        Raises:
            CheckpointError: A folder is incomplete, or no checkpoint of this package.
        """
        self.wait()
        if folder.is_folder(path):
            from lightning_hybrid.checkpoint.read import SavedFolder

            share = self._world.mesh.rank, self._world.layout.world_size
            digests = self._options.check_digests
            saved = SavedFolder(Path(path), weights_only=weights_only, digests=digests, share=share)
            checkpoint = saved.checkpoint(unread=self._unread_parameters())
            self._generator_states = saved.generators()
        else:
            checkpoint = load_file(path, weights_only=weights_only)
        saved_by_ranks = checkpoint.get("hybrid3d", {})
        self.seed = saved_by_ranks.get("seed", self.seed)
        self._report_layout_change(path, saved_by_ranks.get("layout") or {})
        return checkpoint

    def _report_layout_change(self, path: Any, saved: Mapping[str, int]) -> None:
        """Print that a run resumes under another layout, and which random numbers then differ."""
        if not saved or self._module.trainer.state.fn != TrainerFn.FITTING:
            return
        own = self._axis_sizes()
        from lightning_hybrid.checkpoint.contents import describe_layout

        before, now = (describe_layout({axis: sizes.get(axis, 1) for axis in (*AXES, "ep")}) for sizes in (saved, own))
        if before != now:
            counts = len(self._generator_states), self._world.layout.data_parallel_size
            lost = f"; the random generators of {counts[0]} replicas are not restored to {counts[1]}"
            has_lost = counts[0] not in (0, counts[1])
            rank_zero_info(f"{path} was saved under {before} and resumes under {now}{lost * has_lost}")

    def _unread_parameters(self) -> list[str]:
        """FQNs of meta parameters: setup broadcasts their values from the first rank, so that others read none."""
        if self._is_first or not self._state.is_full:
            return []
        named = self._module.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if parameter.is_meta]

    def restore_generators(self) -> None:
        """Restore the generators of user code, if there are as many replicas as in the run that was saved."""
        if len(self._generator_states) == self._world.layout.data_parallel_size:
            restore_plain_states(self._generator_states[self._world.data_rank], self._world.device)
        self._generator_states = []


def _is_same_tensor(value: Tensor, local: Any) -> bool:
    """Whether a tensor in the module's state dict is the tensor that the module holds."""
    return (
        isinstance(local, OwnedShards)
        and (local.shape, local.dtype) == (tuple(value.shape), value.dtype)
        and all(box.content.data_ptr() == value.data_ptr() for box in local.boxes)
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source
        return "unknown"
