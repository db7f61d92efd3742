"""A Lightning strategy on ranks that saves and loads module and optimizer states, full or sharded."""

from __future__ import annotations

import contextlib
import reprlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_hybrid.run.checkpoint_files import CheckpointFiles
from lightning_hybrid.run.checkpoint_folders import CheckpointFolders
from lightning_hybrid.run.module_state import FullOrShardedState
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.start.compiled_module import uncompiled
from lightning_hybrid.strategies.start.empty_init import EmptyInit
from lightning_hybrid.strategies.state.partial import check_is_full
from lightning_hybrid.strategies.world.ranked_strategy import RankedStrategy


def _files_of(options: Options) -> CheckpointFiles:
    return CheckpointFolders() if options.save_distributed_checkpoint else CheckpointFiles()


class CheckpointedStrategy(RankedStrategy):
    """Builds parameters without storage, and saves and loads what the ranks hold.

    Attributes:
        options: The arguments of the strategy.
    """

    def __init__(self, options: Options, **lightning: Any) -> None:
        super().__init__(options, **lightning)
        self._options_for: Callable[[], Any] | None = None  # refers to the module that options are planned for
        self._files = _files_of(options)
        self._state: FullOrShardedState | None = None
        self._empty: EmptyInit | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle neither a module's state nor open files."""
        return {
            **super().__getstate__(),
            "_files": _files_of(self.options),
            "_state": None,
            "_options_for": None,
        }

    @property
    def _lightning_module(self) -> Any:
        """The module of the Trainer, where Lightning's strategies have it."""
        return self.__dict__.get("_lightning_module")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # Lightning sets it just before it refuses a compiled module for any strategy that it does not know.
        compiled = uncompiled(module)
        if module is not None:
            if self._options_for is not None and module is not self._options_for():
                # What was planned, or compiled, was for another module.
                self.options, self.predicted_plan = self._requested, None
            self._options_for = weakref.ref(module)
        if compiled is not None and self.options.compile is None:
            self.options = replace(self.options, compile=compiled or "units")
            rank_zero_info(
                f"{type(module).__name__} was compiled as one function, and is compiled layer by layer, as with"
                f" compile={reprlib.repr(self.options.compile)}"
            )
        self.__dict__["_lightning_module"] = module

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build tensors on the right device in the right dtype; with ``empty_init`` parameters hold no storage."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().tensor_init_context(empty_init=False))
            if empty_init:
                self._empty = self._empty or EmptyInit(self.root_device)
                stack.enter_context(self._empty.building())
            yield

    def _adopt_empty_init(self) -> EmptyInit | None:
        """Return the initial values of a module that is on the meta device; None if it is not."""
        assert self.lightning_module is not None
        self._empty = EmptyInit.adopted(self.lightning_module, self._empty, self.root_device)
        return self._empty

    def connect_state(self, module: pl.LightningModule) -> None:
        """Follow the module of a run; the states of optimizers stay as the latest fit left them."""
        fits = module._trainer is None or module._trainer.state.fn == "fit"
        kept = None if fits or self._state is None else self._state.optimizers
        self._state = FullOrShardedState(module, self.world, kept)
        self._files.connect(module, self.world, self._state, self.options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather the state dict of the full module on the first rank; collective."""
        return super().lightning_module_state_dict() if self._state is None else self._state.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a full state dict into the local shards."""
        assert self._state is not None and self.lightning_module is not None
        if self._state.is_full:
            check_is_full(self.lightning_module)
            self._adopt_empty_init()
        self._state.load_module(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as a checkpoint has it; collective."""
        return self._files.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's state for the parameters of this rank, and the generators' if there are as many."""
        assert self._state is not None
        self._state.optimizers.load(self.optimizers, checkpoint["optimizer_states"])
        self._files.restore_generators()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder, each rank its own bytes, or one file on the first rank."""
        if self._state is None and not self.options.save_distributed_checkpoint:  # before the ranks have met
            if self.forked_ranks_ended and "optimizer_states" in checkpoint:
                rank_zero_warn(
                    f"{filepath} has the weights and no optimizer states: these have ended with the forked processes"
                    " (start_method='fork'); resume from a checkpoint that ModelCheckpoint has saved in the run, or set"
                    " weights_only=True to save no others"
                )
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.check_not_forked("rank to write a folder (save_distributed_checkpoint=True)")
        _ = self.world
        self._files.save(checkpoint, filepath, storage_options, self.checkpoint_io)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder or a file on every rank."""
        return self._files.load(checkpoint_path, weights_only, self.checkpoint_io)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the one being written is complete."""
        if not self._files.removes(filepath):
            super().remove_checkpoint(filepath)
