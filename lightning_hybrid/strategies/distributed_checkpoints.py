"""Distributed checkpoints as Lightning's hooks see them: every rank writes its own bytes into a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_hybrid.checkpoint import checkpoint_folder as folder
from lightning_hybrid.checkpoint.background_save import Background
from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
from lightning_hybrid.checkpoint.generator_states import generator_states, restore_generators
from lightning_hybrid.checkpoint.owned_shards import Held, Holdings, whole
from lightning_hybrid.checkpoint.reading import SavedFolder, SavedOptimizer
from lightning_hybrid.checkpoint.writing import Buffers, prepare, write
from lightning_hybrid.layout import AXES
from lightning_hybrid.strategies.checkpoint_state import StagedStrategy
from lightning_hybrid.strategies.world.rank_failures import warn_of_missing_checkpoint

# Lightning's name for what it saves before it asks SLURM for the job's return: it must be there by then.
_BEFORE_REQUEUE = "hpc_ckpt"


class FolderStrategy(StagedStrategy):
    """A strategy whose checkpoints may be folders, and which loads folders and files alike."""

    def __init__(self, *, save_distributed_checkpoint: bool, async_checkpoint: bool, **options: Any) -> None:
        """Make the strategy.

        Args:
            save_distributed_checkpoint: Whether to save folders.
            async_checkpoint: Whether training goes on while they are written.
            options: As ``StagedStrategy``.
        """
        super().__init__(**options)
        self._saves_folders = save_distributed_checkpoint
        self._saves_beside = async_checkpoint
        self._background = Background()
        self._buffers = Buffers()
        self._writers: tuple[Any, ProcessGroup | None] | None = None
        self._drawn: list[dict[str, Any]] = []  # by replica, what a resumed run's generators had drawn

    def setup_environment(self) -> None:
        """Ask the module in this strategy's way when a checkpoint is made.

        Raises:
            ValueError: Files were to be written in a way of the user's own.
        """
        super().setup_environment()
        if not self._saves_folders:
            return
        if type(self._checkpoint_io) not in (type(None), TorchCheckpointIO):
            raise ValueError(
                f"save_distributed_checkpoint=True writes folders by itself, but {type(self._checkpoint_io).__name__}"
                " was given to write files; leave out one of them"
            )
        assert self.lightning_module is not None
        for callback in self._model_checkpoints() if self._saves_beside else ():
            if callback.save_last == "link":
                raise ValueError(
                    f"{type(callback).__name__}(save_last='link') links to a checkpoint that async_checkpoint=True is"
                    " still writing, so a kill would leave a link to nothing; set save_last=True, whose checkpoint is"
                    " replaced when the new one is whole"
                )
        connector: Any = self.lightning_module.trainer._checkpoint_connector
        # Whoever else asks for `lightning_module_state_dict()` means whole tensors.
        connector._get_lightning_module_state_dict = self._held_module

    @property
    def _holdings(self) -> Holdings:
        assert self.lightning_module is not None
        return Holdings(self.lightning_module, self._shard_mesh, self._plan, self._parts)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _held_module(self) -> dict[str, Any]:
        """The state dict of the module, with ``Held`` for its tensors."""
        module = self.lightning_module
        assert module is not None
        if not self._is_whole:
            if self._cut_off:
                return {}
            self._meet("trainer.save_checkpoint(...)")
            self._check_files()
        with self._unguarded(), torch._C.DisableTorchFunction():
            held = self._holdings.module()
            if not self._is_whole:
                return held
            # The module's own method may leave something out, or add to it.
            given = module.state_dict()
        for name, value in given.items():
            if isinstance(value, Tensor):
                own = held.get(name)
                given[name] = own if _is_given(value, own) else whole(value, counts=self.is_global_zero)
        return given

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """The state dict of a copy of the module, in parts as it is, as a checkpoint has it."""
        return self._holdings.module(copy) if self._saves_folders else super().averaged_state(copy)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer as a checkpoint has it: of this rank, by FQN, or whole on the first rank."""
        if not self._saves_folders:
            return super().optimizer_state(optimizer)
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        self._check_files()
        with torch._C.DisableTorchFunction():
            return self._holdings.optimizer(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder, each rank its own part, or one file.

        Raises:
            TypeError: ``storage_options`` are given for a folder.
            CheckpointError: It cannot be written; or the one before it could not.
        """
        if not self._saves_folders:
            if self.is_global_zero and folder.is_folder(filepath) and folder.is_checkpoint(Path(filepath)):
                folder.remove(Path(filepath))
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._cut_off and not self._is_whole:
            warn_of_missing_checkpoint(filepath)
            return
        if storage_options is not None:
            raise TypeError("save_checkpoint(storage_options=...) is for a CheckpointIO, which writes no folders")
        if "://" in str(filepath):
            raise CheckpointError(
                f"{filepath} is not local, and distributed checkpoints are; set save_distributed_checkpoint=False, or"
                " save to a folder that all ranks share and copy it"
            )
        with self.launcher_world(), torch._C.DisableTorchFunction():
            path = Path(os.path.abspath(self.broadcast(os.fspath(filepath))))
            self.wait_for_checkpoint()
            waited_for = path.name.startswith(_BEFORE_REQUEUE) or self._is_first_last(path)
            beside = self._saves_beside and self._is_running and not self.broadcast(waited_for)
            state = {**checkpoint, "hybrid3d": {"seed": self._seed}}
            about = self._about(checkpoint)
            buffers = self._buffers if beside else None
            drawn = generator_states(self.root_device)
            save = prepare(state, path, self._shard_mesh, about, buffers=buffers, generators=drawn)
            if not beside or save.error is not None:
                write(save, self._group)
                return
            if self.is_global_zero and not path.exists():
                path.mkdir(parents=True)  # the name is taken: whoever looks for a free one must see it
            self._background.start(save, self._group)

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        assert self.lightning_module is not None
        return [c for c in self.lightning_module.trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]

    def _is_first_last(self, path: Path) -> bool:
        """Whether ``ckpt_path="last"`` would find what is written now, and nothing if that were not there.

        A name that is held by an empty folder would be found too, after a kill, and refused at each restart.
        """
        names = {callback.CHECKPOINT_NAME_LAST for callback in self._model_checkpoints()}
        return any(path.name.startswith(name) for name in names) and not path.exists()

    @property
    def _group(self) -> ProcessGroup | None:
        """All ranks, for writers alone."""
        if self._writers is None or self._writers[0] is not self.mesh:
            self._writers = self.mesh, self.mesh.further_world(self._timeout)
        return self._writers[1]

    @property
    def _is_running(self) -> bool:
        """Whether there is an end of a run to wait at."""
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.state.status == TrainerStatus.RUNNING)

    def _about(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        stages = 1 if self._plan is None else self._plan.stages_per_rank
        packages = {"lightning_hybrid": "lightning-hybrid", "torch": "torch"}
        versions = {name: _version(package) for name, package in packages.items()}
        sizes = {**dict(zip(AXES, self.layout.sizes, strict=True)), "ep": self.layout.expert_parallel_size}
        return {
            "layout": {**sizes, "stages_per_rank": stages},
            "versions": {**versions, "lightning": checkpoint.get("pytorch-lightning_version")},
            "step": checkpoint.get("global_step"),
            "epoch": checkpoint.get("epoch"),
        }

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is there.

        Raises:
            CheckpointError: It could not be written.
        """
        self._background.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before the one that is being written is there."""
        if "://" in str(filepath) or not (self._background.is_writing or folder.is_folder(filepath)):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._background.remove(Path(os.path.abspath(filepath)))

    def on_exception(self, exception: BaseException) -> None:
        """What is being written does not need the ranks that failed: it was all copied."""
        super().on_exception(exception)
        self._background.wait(complain=rank_zero_warn)

    def teardown(self) -> None:
        """Nothing is being written when a run has ended."""
        super().teardown()
        self._buffers = Buffers()
        self.wait_for_checkpoint()

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder or a file on every rank.

        Raises:
            CheckpointError: A folder is not whole, or none of ours.
        """
        self.wait_for_checkpoint()
        if not folder.is_folder(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        saved = SavedFolder(Path(checkpoint_path), weights_only=weights_only)
        checkpoint = saved.checkpoint(unread=self._given_by_first())
        self._drawn = saved.generators()
        self._seed = checkpoint.get("hybrid3d", {}).get("seed", self._seed)
        return checkpoint

    def _given_by_first(self) -> list[str]:
        """Parameters of a model built empty: set-up gives every rank what it holds of those of the first one."""
        assert self.lightning_module is not None
        if self.is_global_zero or not self._is_whole:
            return []
        named = self.lightning_module.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if parameter.is_meta]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's state for the parameters of this rank, and the generators' if there are as many."""
        super().load_optimizer_state_dict(checkpoint)
        if len(self._drawn) == self.layout.data_parallel_size:
            restore_generators(self._drawn[self.data_rank], self.root_device)
        self._drawn = []

    def _own_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(state, SavedOptimizer):
            return state.own(optimizer, self._holdings)
        return super()._own_state(optimizer, state)


def _is_given(value: Tensor, held: Any) -> bool:
    """Whether what the module gave for its state dict is what it holds."""
    return (
        isinstance(held, Held)
        and (held.shape, held.dtype) == (tuple(value.shape), value.dtype)
        and all(box.content.data_ptr() == value.data_ptr() for box in held.boxes)
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:  # run from its source
        return "unknown"
