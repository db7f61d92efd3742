"""What the backwards of microbatches add to the gradients of parameters: by which weight, and where hooks see it.

The loss of a microbatch is weighted in one of two places. Usually it is its gradient, from which the backward starts.
But an autograd function of the user may add a gradient of its own (that of a router's auxiliary loss), which ignores
the incoming one: it would count once per microbatch. So where a step applies such functions, its backward starts from
the gradient of the unweighted loss, and what arrives at a parameter is weighted::

    weight * (d loss / d x) -> ...            function adds c         -> ... -> p.grad    c in full from each microbatch
             (d loss / d x) -> ...            function adds c         -> ... -> * weight -> p.grad

A hook that the user has registered on a parameter sees its gradient once per step, as without microbatches: that of
all microbatches, in the backward of the last one.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.fast_named_modules_and_parameters import modules_in, parameters_of
from lightning_hybrid.step.standins.absent_tensors import is_absent


def split_weight(of_loss: float, of_gradients: float, *, scales: bool | None) -> tuple[float, float]:
    """The gradient from which the backward of a microbatch starts, and the factor of what arrives at parameters.

    Args:
        of_loss: The weight of its loss.
        of_gradients: The weight of gradients that ignore that of the loss: its share of the samples.
        scales: Whether microbatches weigh where their gradients reach a parameter.
    """
    if not of_loss:
        return 1.0, 0.0
    return (of_loss / of_gradients, of_gradients) if scales and of_gradients else (of_loss, 1.0)


@contextlib.contextmanager
def without_hooks(root: nn.Module) -> Iterator[None]:
    """Take hooks of the user off the parameters inside."""
    hooked = _taken_off(root)
    try:
        yield
    finally:
        _put_back(hooked)


@dataclass
class _Hooked:
    """A parameter with hooks of the user.

    Attributes:
        parameter: The parameter.
        hooks: Its hooks, taken off during the step.
        sum: The gradient of the microbatches so far; None if there is none.
        stage: The stage whose backward has added to it last.
    """

    parameter: nn.Parameter
    hooks: OrderedDict[int, Callable[[Tensor], Any]]
    sum: Tensor | None = None
    stage: int = 0

    def complete(self) -> Tensor:
        """The sum, as the hooks return it."""
        total, self.sum = self.sum, None
        assert total is not None
        for hook in self.hooks.values():
            changed = hook(total)
            total = total if changed is None else changed
        return total


class ParameterGradients:
    """Weighs gradients where they arrive at parameters, and calls hooks of the user on their sum, in one step.

    Attributes:
        root: The user's module.
    """

    def __init__(self, root: nn.Module, has_parts: bool) -> None:
        """Take over from the hooks of the user on parameters, if this rank runs all of several parts of a batch."""
        self.root, self._factor, self._stage, self._is_last = root, 1.0, 0, True
        self._scaling: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked = _taken_off(root) if has_parts else []
        with torch._C.DisableTorchFunction():
            for hooked in self._hooked:
                hooked.parameter.register_hook(partial(self._collected, hooked))

    @contextlib.contextmanager
    def by(self, factor: float, stage: int = 0, *, is_last: bool) -> Iterator[None]:
        """Run a backward inside.

        Args:
            factor: What it adds to the gradients of parameters is multiplied by this.
            stage: Its stage.
            is_last: Whether it is the last one of this stage.
        """
        if factor != 1.0 and not self._scaling:
            collected = {id(hooked.parameter) for hooked in self._hooked}
            with torch._C.DisableTorchFunction():
                for _, parameter in parameters_of(modules_in(self.root)):
                    if parameter.requires_grad and not is_absent(parameter) and id(parameter) not in collected:
                        self._scaling.append(parameter.register_hook(self._scaled))
        self._factor, self._stage, self._is_last = factor, stage, is_last
        try:
            yield
        finally:
            self._factor = 1.0
        if is_last:
            self._complete(stage)

    def _scaled(self, gradient: Tensor) -> Tensor:
        if not self._factor:  # such a microbatch may have no loss: 0 / 0
            return torch.zeros_like(gradient)
        return gradient if self._factor == 1.0 else gradient * self._factor

    def _collected(self, hooked: _Hooked, gradient: Tensor) -> Tensor:
        scaled = self._scaled(gradient)
        hooked.sum = scaled if hooked.sum is None else hooked.sum + scaled
        hooked.stage = self._stage
        return hooked.complete() if self._is_last else torch.zeros_like(gradient)

    @torch.no_grad()
    def _complete(self, stage: int) -> None:
        """Complete the gradients of parameters that the last microbatch has not used."""
        for hooked in self._hooked:
            if hooked.sum is not None and hooked.stage == stage:
                total, parameter = hooked.complete(), hooked.parameter
                parameter.grad = total if parameter.grad is None else parameter.grad + total

    def close(self) -> None:
        """Give the hooks back to the parameters, at the end of a step."""
        for handle in self._scaling:
            handle.remove()
        _put_back(self._hooked)
        self._scaling, self._hooked = [], []


def _taken_off(root: nn.Module) -> list[_Hooked]:
    found = []
    with torch._C.DisableTorchFunction():
        for _, parameter in parameters_of(modules_in(root)):
            if parameter._backward_hooks and not is_absent(parameter):
                found.append(_Hooked(parameter, OrderedDict(parameter._backward_hooks)))
                parameter._backward_hooks.clear()
    return found


def _put_back(hooked: list[_Hooked]) -> None:
    with torch._C.DisableTorchFunction():
        for each in hooked:
            hooks: Any = each.parameter._backward_hooks
            hooks.clear()
            hooks.update(each.hooks)
