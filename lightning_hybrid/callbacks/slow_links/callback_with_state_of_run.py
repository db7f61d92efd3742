"""Base class of callbacks that change what replicas send, and whose state is that of a run and its layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

Gather = Callable[[Optimizer], dict[str, Any]]


class ConnectedState(Protocol):
    """State of a run that checkpoints have: tensors of parameters by FQN, and other values."""

    def save(self, gather: Gather | None = None) -> dict[str, Any]:
        """Return the state as a checkpoint has it, or in full for another layout of the same run; collective.

        ``gather`` returns the state dict of an optimizer in full, for another layout; None for a checkpoint.
        """


class SlowLinkCallback(Callback):
    """A callback that the strategy connects to the state of a run, which checkpoints have.

    Attributes:
        purpose: What it does, a sentence that begins with its name.
        loaded: The state of a checkpoint, for the next run.
    """

    purpose: str

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self._state: ConnectedState | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the run."""
        return {**self.__dict__, "_state": None}

    @property
    @abstractmethod
    def description(self) -> str:
        """The line of the start table."""

    def is_local(self, global_step: int) -> bool:
        """Whether replicas step by themselves at a step of the run."""
        return False

    def connect(self, state: ConnectedState) -> None:
        """Save this state in checkpoints from now on; the strategy calls it."""
        self._state = state

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that a strategy has connected it."""
        if self._state is None and trainer.world_size > 1:
            raise ValueError(
                f'{self.purpose}, which {type(trainer.strategy).__qualname__} does not; use strategy="hybrid3d"'
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a checkpoint has it."""
        return self.loaded if self._state is None else self._state.save()

    def carry(self, gather: Gather, broadcast: Callable[[Any], Any]) -> None:
        """Keep the state for another layout of the same run; collective."""
        if self._state is not None:
            self.loaded = broadcast(self._state.save(gather))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, which the next run uses."""
        self.loaded = state_dict
