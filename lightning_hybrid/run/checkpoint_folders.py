"""Checkpoints in folders, in which each rank writes its own bytes, while training goes on if the user wants it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.full import saved_tensors
from lightning_hybrid.checkpoint.local import unsharded
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.patching import replace
from lightning_hybrid.randomness.generators import plain_generator_states
from lightning_hybrid.run.checkpoint_files import CheckpointFiles
from lightning_hybrid.run.setting import Setting

if TYPE_CHECKING:
    from lightning_hybrid.checkpoint.write import HostBuffers

# Lightning's name for what it saves before it asks SLURM for the job's return: it must be there by then.
_BEFORE_REQUEUE = "hpc_ckpt"


class CheckpointFolders(CheckpointFiles):
    """Saves checkpoints as folders of all ranks."""

    _are_of_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self._reading_shards = contextlib.ExitStack()  # when closed, Lightning's checkpoints read full states
        self._buffers: HostBuffers | None = None  # of the run, once it saves beside training
        self._writers: tuple[Any, ProcessGroup | None] = None, None

    def check(self, checkpoint_io: Any) -> None:
        """Check that folders can be written, and let Lightning read local shards for them.

        Raises:
            ValueError: The user has a ``CheckpointIO``, or links to the last checkpoint.
        """
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
        own = saved_tensors(self._module)
        for name, value in full.items():
            if isinstance(value, Tensor):
                is_own = name in own and own[name].data_ptr() == value.data_ptr() and own[name].shape == value.shape
                divided[name] = local[name] if is_own else unsharded(value, counts=self._is_first)
        return divided

    def warn_of_size(self, setting: Setting) -> None:
        """Do nothing: no rank gathers a checkpoint."""

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """Return the local shards of a copy of the module, by FQN."""
        return self._state.local_states.module(copy)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the local shards of the state of an optimizer, by FQN."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        self._state.optimizers.check_files()
        with torch._C.DisableTorchFunction():
            return self._state.optimizers.local_states.optimizer(optimizer)

    def _write(self, state: dict[str, Any], path: Any, storage_options: Any, checkpoint_io: CheckpointIO) -> None:
        if storage_options is not None:
            raise TypeError("save_checkpoint(storage_options=...) is for a CheckpointIO, which writes no folders")
        if "://" in str(path):
            raise CheckpointError(
                f"{path} is not local, and distributed checkpoints are; set save_distributed_checkpoint=False, or"
                " save to a folder that all ranks share and copy it",
                entry="save-local",
            )
        from lightning_hybrid.checkpoint.write import HostBuffers, prepare, write

        world = self._world
        with world.as_launcher(), torch._C.DisableTorchFunction():
            path = Path(os.path.abspath(world.broadcast(os.fspath(path))))
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
        if self._writers[0] is not self._world.mesh:
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

    def close(self, *, in_shards: bool) -> None:
        """Wait for the checkpoint being written at the end of a run."""
        self._buffers = None
        super().close(in_shards=in_shards)
        if not in_shards:  # else checkpoints after the run are of shards too
            self._reading_shards.close()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source
        return "unknown"
