"""Checkpoints on disk as Lightning's hooks see them: one file of the first rank; those in folders derive from these."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint import folder
from lightning_hybrid.checkpoint.archive import check_archive
from lightning_hybrid.checkpoint.background import BackgroundSave
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.layout import AXES
from lightning_hybrid.randomness.generators import restore_plain_states
from lightning_hybrid.run.module_state import FullOrShardedState
from lightning_hybrid.run.resumed_epochs import SavedEpochs
from lightning_hybrid.run.setting import Setting, needs_runner
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.start.file_size import warn_of_large_single_file
from lightning_hybrid.strategies.world.failures import warn_of_missing_checkpoint
from lightning_hybrid.strategies.world.ranks import RankWorld
from lightning_hybrid.text import wrapped

_LISTED = 4


class CheckpointFiles:
    """Saves the checkpoints of one module as single files, and loads files and folders alike.

    Attributes:
        seed: Of keyed randomness, from the checkpoint that was loaded; None if none was.
    """

    _are_of_ranks = False  # whether each rank writes its own bytes

    def __init__(self) -> None:
        self.seed: int | None = None
        self._background = BackgroundSave()
        self._epochs = SavedEpochs()
        self._generator_states: list[dict[str, Any]] = []  # by replica, what a resumed run's generators had drawn

    def connect(
        self, module: pl.LightningModule, world: RankWorld, state: FullOrShardedState, options: Options
    ) -> None:
        """Bind to one run: its module, ranks and state, and its options, which are planned by now."""
        self._module, self._world, self._state, self._options = module, world, state, options

    def adopt_seed(self, seed: int) -> int:
        """Return the seed of the loaded checkpoint, or of an earlier run; the agreed one if there is none."""
        self.seed = seed if self.seed is None else self.seed
        return self.seed

    def check(self, checkpoint_io: Any) -> None:
        """Check that checkpoints can be written."""

    def warn_of_size(self, setting: Setting) -> None:
        """Warn if a checkpoint of the run takes much of the memory of the rank that gathers it."""
        with only_informs("the estimated size of a checkpoint"):
            warn_of_large_single_file(
                setting.trainer, setting.module, setting.trainer.optimizers, **setting.sizes_of_states
            )

    # -- states -------------------------------------------------------------------------------------------------------

    def averaged_state(self, copy: nn.Module) -> dict[str, Any]:
        """Return the state dict of a copy of the module, sharded as the module is, as a checkpoint has it."""
        return self._state.gathered(copy)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as a checkpoint has it, on the first rank."""
        return self._state.optimizers.full_state(optimizer)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any, checkpoint_io: CheckpointIO) -> None:
        """Write a folder, each rank its own bytes, or one file on the first rank.

        Raises:
            TypeError: ``storage_options`` are passed for a folder.
            CheckpointError: It cannot be written; or the one before it could not.
        """
        if self._world.is_disconnected and not self._state.is_full:
            warn_of_missing_checkpoint(path)
            return
        layout = self._world.layout
        own = {"seed": self.seed, "layout": self._axis_sizes()}
        is_keyed = self._are_of_ranks or layout.world_size > 1 or needs_runner(self._options, layout)
        self._write({**checkpoint, **({"hybrid3d": own} if is_keyed else {})}, path, storage_options, checkpoint_io)

    def _write(self, state: dict[str, Any], path: Any, storage_options: Any, checkpoint_io: CheckpointIO) -> None:
        if self._is_first:
            if folder.is_folder(path) and folder.is_checkpoint(Path(path)):
                folder.remove(Path(path))
            checkpoint_io.save_checkpoint(state, path, storage_options=storage_options)

    @property
    def _is_first(self) -> bool:
        return self._world.mesh.rank == 0

    def _axis_sizes(self) -> dict[str, Any]:
        others = {"stages_per_rank": self._state.stages_per_rank, "zero_stage": self._options.zero_stage}
        widths = {"stage_widths": self._state.stage_widths} if self._state.stage_widths else {}
        return {**self._world.layout.by_axis, **others, **widths}

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete; a CheckpointError if it could not be."""
        self._background.wait()

    def finish_after_failure(self) -> None:
        """Wait until the checkpoint being written is complete, and warn if it could not be."""
        try:
            self.wait()
        except CheckpointError as error:
            rank_zero_warn(str(error))

    def removes(self, filepath: Any) -> bool:
        """Remove a folder, after the one being written is complete; return whether it may be one."""
        if "://" in str(filepath) or not (self._background.is_writing or folder.is_folder(filepath)):
            return False
        if self._is_first:
            self._background.remove(Path(os.path.abspath(filepath)))
        return True

    def close(self, *, in_shards: bool) -> None:
        """Wait for the checkpoint being written at the end of a run, which may leave the module ``in_shards``."""
        self.wait()

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, path: Any, weights_only: bool | None, checkpoint_io: CheckpointIO) -> dict[str, Any]:
        """Read a folder or a file on every rank; a resumed run draws what the saved one would.

        Raises:
            CheckpointError: A folder is incomplete, or no checkpoint of this package; or a file is damaged, or none of
                Lightning.
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
            torch.cuda.empty_cache()
            # Lightning passes a function that leaves storages on the host; torch loads no quantized states by one.
            place: dict[str, Any] = {"map_location": "cpu"} if type(checkpoint_io) is TorchCheckpointIO else {}
            if place and os.path.isfile(path):
                check_archive(path)
            checkpoint = checkpoint_io.load_checkpoint(path, weights_only=weights_only, **place)
            _check_kind(path, checkpoint)
        saved_by_ranks = checkpoint.get("hybrid3d", {})
        self.seed = saved_by_ranks.get("seed", self.seed)
        self._report_layout_change(path, checkpoint, saved_by_ranks.get("layout") or {})
        return checkpoint

    def _report_layout_change(self, path: Any, checkpoint: Mapping[str, Any], saved: Mapping[str, int]) -> None:
        """Print that a run resumes under another layout, and which random numbers and numbers of steps then differ."""
        if not saved or self._module.trainer.state.fn != TrainerFn.FITTING:
            return
        own = self._axis_sizes()
        from lightning_hybrid.checkpoint.contents import describe_layout

        shown = (*AXES, "ep", "zero_stage")
        before, now = (
            describe_layout({axis: sizes[axis] for axis in shown if axis in sizes}) for sizes in (saved, own)
        )
        if before != now:
            counts = len(self._generator_states), self._world.layout.data_parallel_size
            lost = f"; the random generators of {counts[0]} replicas are not restored to {counts[1]}"
            has_lost = counts[0] not in (0, counts[1])
            rank_zero_info(wrapped(f"{path} was saved under {before} and resumes under {now}{lost * has_lost}"))
        replicas = math.prod(saved.get(axis, 1) for axis in ("dp_replicate", "dp_shard"))
        self._epochs = SavedEpochs.of(checkpoint, replicas)

    def report_epochs(self) -> None:
        """Print how the epochs of a resumed run change with the number of replicas, once the loader is made."""
        batches = self._module.trainer.num_training_batches
        saved, self._epochs = self._epochs, SavedEpochs()
        if text := saved.changes_to(self._world.layout.data_parallel_size, batches):
            (rank_zero_warn if saved.schedules else rank_zero_info)(wrapped(text))

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


def _check_kind(path: Any, checkpoint: Any) -> None:
    """Refuse a file of something else, such as weights alone, in which Lightning would miss a key."""
    if not isinstance(checkpoint, Mapping) or "pytorch-lightning_version" not in checkpoint:
        keys = list(map(str, checkpoint)) if isinstance(checkpoint, Mapping) else []
        found = f" with the keys {', '.join(keys[:_LISTED])}{', ...' * (len(keys) > _LISTED)}" if keys else ""
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning but a {type(checkpoint).__name__}{found}, and has no"
            " 'pytorch-lightning_version'; ckpt_path resumes a run, so to start from weights alone call"
            " module.load_state_dict before fit, and leave ckpt_path out",
            entry="other-kind",
        )
