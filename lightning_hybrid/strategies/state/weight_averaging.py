"""Weight averaging (SWA, EMA) on shards: the copies of the module that Lightning's callbacks keep.

They are made before the module is sharded. Afterwards each rank keeps, averages and swaps the shard of the copy that it
holds of the module; files and the end of training have the full copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_hybrid.checkpoint.full import load_module_state
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import replace, replaced
from lightning_hybrid.pipeline.stages.plan import (
    drop_absent_in_copy,
    unshard_parameters,
)
from lightning_hybrid.step.standins.tensors import is_absent

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.stages.plan import StagePlan

_REASON = "weight averaging of a sharded module"
# Where the callbacks go through the parameters of both.
_STEPS = ("update_parameters", "transfer_weights", "_swap_models", "_copy_average_to_current")


class WeightAverages:
    """The copies of one module that its trainer's callbacks, already set up, keep."""

    def __init__(self, trainer: Any) -> None:
        self._callbacks: list[Any] = [
            callback
            for callback in trainer.callbacks
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging) and callback._average_model is not None
        ]
        self._is_resumed = trainer.state.fn == "fit" and trainer.ckpt_path is not None
        self._undo = contextlib.ExitStack()
        self._plan: StagePlan | None = None
        self._parts = LocalShards(trainer.lightning_module, ())

    @property
    def copies(self) -> list[nn.Module]:
        """The copies, with the parameter names of the module."""
        return [_module_of(callback._average_model) for callback in self._callbacks]

    def follow(
        self,
        module: pl.LightningModule,
        plan: StagePlan | None,
        parts: LocalShards,
        owner: Any,
    ) -> None:
        """Shard the copies as the module is sharded; the ``owner`` of the run saves them.

        Raises:
            ValueError: A copy of a module that was built empty should have got the values of a checkpoint.
        """
        for callback, copy in zip(self._callbacks, self.copies, strict=True):
            if any(copied.is_meta for copied in copy.parameters()):
                self._fill(callback, module, copy)
            if plan is None:
                continue
            if isinstance(callback, StochasticWeightAveraging):
                copy.to(callback._device or module.device)  # as it does when it begins to average
            drop_absent_in_copy(module, copy)
            parts.shard_parameters(copy)
            self._shard_copy(callback, module, parts, owner)
        self._plan, self._parts = plan, parts

    def _fill(self, callback: Any, module: nn.Module, copy: nn.Module) -> None:
        """Assign the values of the module to a copy that was made before the module had any."""
        if self._is_resumed:
            raise ValueError(
                f"{type(callback).__name__} cannot resume an average for a model that was built empty; build the model"
                " without trainer.init_module(empty_init=True) when you pass ckpt_path"
            )
        for (name, original), (_, copied) in zip(module.named_parameters(), copy.named_parameters(), strict=True):
            if copied.is_meta:
                owner, _, member = name.rpartition(".")
                value = original if is_absent(original) else original.detach().clone()
                parameter = value if is_absent(value) else nn.Parameter(value, requires_grad=original.requires_grad)
                copy.get_submodule(owner)._parameters[member] = parameter  # type: ignore[assignment]

    def _shard_copy(self, callback: Any, module: nn.Module, parts: LocalShards, owner: Any) -> None:
        average = callback._average_model
        copy = _module_of(average)
        prefix = "module." if average is not copy else ""

        def state_dict(*_: Any, **__: Any) -> dict[str, Any]:
            with torch._C.DisableTorchFunction():  # a user's class of such a callback may save it in a hook of its own
                state = nn.Module.state_dict(average)
                own = {name: value for name, value in state.items() if not name.startswith(prefix)}
                full = owner.averaged_state(copy)
                return {**(own if prefix else {}), **{prefix + name: value for name, value in full.items()}}

        def load_state_dict(state: Any, strict: bool = True, **_: Any) -> None:
            load_module_state(average, state, parts, strict=strict, prefix=prefix)

        members: dict[str, Any] = {"state_dict": state_dict, "load_state_dict": load_state_dict}
        if prefix == "":  # SWA moves its copy when it begins to average; it is there, and what is absent cannot move
            members["to"] = lambda *_, **__: average
        for name, function in members.items():
            self._undo.callback(replace(average, name, function, reason=_REASON))
        for each in (callback, average):
            for name in _STEPS:
                if hasattr(each, name):
                    present = _on_present(getattr(each, name), [module, copy, average])
                    self._undo.callback(replace(each, name, present, reason=_REASON))

    def unshard_parameters(self) -> None:
        """Gather the full copies on every rank; collective over the pipeline."""
        self._undo.close()
        if self._plan is not None:
            for copy in self.copies:
                self._parts.unshard_parameters(copy)
                unshard_parameters(self._plan, copy)
            self._plan = None

    def leave(self) -> None:
        """Restore the callbacks, whatever the copies hold."""
        self._undo.close()


def _module_of(average: nn.Module) -> nn.Module:
    module = average.module if isinstance(average, AveragedModel) else average
    assert isinstance(module, nn.Module)
    return module


def _on_present(function: Callable[..., Any], modules: list[nn.Module]) -> Callable[..., Any]:
    """Wrap a function so that modules have only the parameters that are on this rank."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # What is on each rank is averaged there: nothing of it is for all ranks to know.
        with contextlib.ExitStack() as stack, torch._C.DisableTorchFunction():
            for module in {id(module): module for module in modules}.values():
                stack.enter_context(_only_present(module))
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _only_present(module: nn.Module) -> Iterator[None]:
    def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for p in type(module).parameters(module, recurse) if not is_absent(p))

    with replaced(module, "parameters", parameters, reason="averages of parameters that are here"):
        yield
