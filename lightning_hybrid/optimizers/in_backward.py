"""Optimizer steps in the backward: parameters are stepped once their gradients are final, which are freed then.

    backward   layer 3      layer 2      layer 1
    gradients  [layer 3] -> step, free
                            [layer 2] -> step, free
                                         [layer 1] -> step, free

The gradients of one layer are alive at a time, and a step on the host or in a file overlaps with the backward. What
completes gradients calls `StepsInBackward.step`: the hooks of this class in one process, a gradient reducer after the
average over replicas, a ZeRO group after its reduce-scatter. What is not stepped in the backward is stepped when the
optimizer's step is called, which also runs its hooks once.

[Note: values of the backward] A parameter is stepped after autograd has accumulated its gradient, so all operations
that differentiate by it have run. One that reads it without differentiating (``weight.detach()``) may still run; torch
raises an error then, since the value has another version than the saved one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.errors import BackwardStepError
from lightning_hybrid.optimizers.replacement import Place, only_parameters, step_after_closure, without_step_hooks
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.step.objects.tensors import GradientHook
from lightning_hybrid.step.standins.tensors import is_absent


class SubsetStep(Protocol):
    """A step of some parameters of an optimizer, and what has to be complete before its own step returns."""

    def step_subset(self, parameters: Sequence[Tensor]) -> None:
        """Step these parameters, of any shape, whose gradients are final."""


class InPlaceSubsetStep:
    """Steps some parameters where they are, by the optimizer's own step."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Take an optimizer that treats each parameter by itself."""
        self._optimizer, self._original = optimizer, optimizer.step

    def step_subset(self, parameters: Sequence[Tensor]) -> None:
        """Step these parameters, of any shape, whose gradients are final."""
        with without_step_hooks(self._optimizer), only_parameters(self._optimizer, set(map(id, parameters))):
            self._original()


class StepsInBackward:
    """The steps of one optimizer in the backward."""

    def __init__(
        self,
        optimizer: Optimizer,
        subset: SubsetStep,
        layers: Sequence[Sequence[nn.Parameter]],
        *,
        names: Mapping[int, str],
    ) -> None:
        """Replace the optimizer's step.

        ``layers`` are those where autograd completes the gradients of this rank; empty where reducers do.
        """
        self._is_allowed = False
        self._optimizer, self._subset, self._names = optimizer, subset, names
        self._layers = [list(layer) for layer in layers]
        self._layer_of = {id(p): number for number, layer in enumerate(self._layers) for p in layer}
        self._is_last = False  # whether the present backward completes gradients
        self._missing: Counter[int] = Counter()  # gradients that are not complete, by layer
        self._stepped: set[int] = set()  # ids
        self._present: set[int] = set()
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._original = optimizer.step
        self._undo = step_after_closure(optimizer, self._finish, Place.BACKWARD, reason="steps in the backward")

    def allow(self, is_allowed: bool) -> None:
        """Step parameters in the present step's backward: it completes the gradients, and is not rolled back."""
        self._is_allowed = is_allowed

    def begin_backward(self, *, is_last: bool) -> None:
        """Begin a backward of this rank; ``is_last`` tells whether it completes the gradients of its parameters."""
        self._is_last = is_last and self._is_allowed
        if not self._is_last:
            return
        self._present = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self._missing.clear()
        for number, layer in enumerate(self._layers):
            for p in layer:
                if not is_absent(p) and p.requires_grad and id(p) in self._present:
                    self._missing[number] += 1
                    if id(p) not in self._hooks:  # a frozen parameter accepts no hook
                        hook = GradientHook(self._on_gradient, lambda: not self._is_last)
                        self._hooks[id(p)] = hook.register(p)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_last:
            return
        self._check_unstepped([parameter])
        number = self._layer_of[id(parameter)]
        self._missing[number] -= 1
        if not self._missing[number]:
            self.step(self._layers[number])

    @below_read_guards
    @torch.no_grad()
    def step(self, parameters: Collection[Tensor]) -> None:
        """Step the parameters, of any shape, that have final gradients, which are freed; others stay as they are.

        Raises:
            BackwardStepError: One of them has been stepped in this step already.
        """
        if not self._is_allowed:
            return
        present = self._present or {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        ready = [p for p in parameters if id(p) in present and not is_absent(p) and p.grad is not None]
        ready = [p for p in ready if p.grad is not None and not p.grad.is_sparse]
        if not ready:
            return
        self._check_unstepped(ready)
        self._subset.step_subset(ready)
        for p in ready:
            p.grad = None
        self._stepped.update(map(id, ready))

    @torch.no_grad()
    def step_shards(self, shown: AbstractContextManager[Sequence[nn.Parameter]]) -> None:
        """Step parameters that hold shards, and their final gradients, inside a context."""
        if self._is_last:
            with shown as parameters:
                self.step(parameters)

    def _check_unstepped(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            if id(p) in self._stepped:
                raise BackwardStepError(
                    f"optimizer_in_backward=True: {self._names.get(id(p), 'a parameter')} got another gradient after it"
                    " had been stepped; set use_reentrant=False where a checkpointed function shares this parameter, or"
                    " optimizer_in_backward=False",
                    entry="backward-step-twice",
                )

    def _finish(self, kwargs: dict[str, Any]) -> None:
        """Step the rest; parameters without a gradient are skipped."""
        self.reset()
        self._original(**kwargs)

    def reset(self) -> None:
        """End a step: no parameter is stepped until the next one is allowed to."""
        self._is_allowed = self._is_last = False
        self._stepped.clear()
        self._present = set()

    def close(self) -> None:
        """Restore the optimizer's own step."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._undo()
