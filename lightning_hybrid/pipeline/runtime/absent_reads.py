"""Reads of parameters of other stages by code of the user that runs in a backward: hooks on gradients.

A stage runs its backward while others do something else, so the content cannot be asked for there. The step is undone
and runs on shards from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.errors import WITHOUT_STAGES, StepChanged
from lightning_hybrid.step.standins.absent_tensors import SHAPE_METHODS, is_absent

_PROPERTIES = frozenset({"__get__", "__set__", "__delete__"})  # of which those with content are methods' results


class AbsentParameterReads(TorchFunctionMode):
    """Raises where a function reads a parameter that is on another stage, while it is entered."""

    def __init__(self, root: nn.Module) -> None:
        """Take the user's module, of which some parameters are absent."""
        super().__init__()
        self._root = root

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function.

        Raises:
            StepChanged: It reads an absent parameter.
        """
        name = getattr(func, "__name__", "")
        if name not in SHAPE_METHODS and name != "__hash__":
            member = func.__self__.__name__ if name in _PROPERTIES else ""
            for arg in args if member in ("", "data") else ():
                for leaf in arg if isinstance(arg, list | tuple) else (arg,):
                    if is_absent(leaf) and getattr(leaf, "_is_param", False):
                        raise self._error(leaf)
        return func(*args, **(kwargs or {}))

    def backward(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Run `torch.autograd.backward` of values with their gradients, of any shapes, in this mode.

        Torch's own function is one that a mode handles, and so would run outside of it.
        """
        engine = torch.autograd.Variable._execution_engine
        with self:
            engine.run_backward(
                tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _error(self, parameter: Any) -> StepChanged:
        fqn = next((fqn for fqn, other in self._root.named_parameters() if other is parameter), "")
        return StepChanged(
            f"a hook on a gradient reads '{fqn}', a parameter of another stage, in the backward; read it in the step or"
            f" in a hook such as on_train_batch_start, or {WITHOUT_STAGES}",
            entry="hook-reads-stage",
        )
