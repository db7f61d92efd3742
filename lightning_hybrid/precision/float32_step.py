"""Optimizer step in float32 on parameters of bfloat16, by the user's own optimizer.

    p.data, p.grad              bfloat16, before and after the step: forward, backward and collectives use them
    float32 copies of both      in their place while the optimizer steps; its states are made for them, in float32
    p.data                      gets the new value: the nearest one, or one of both neighbours at random

With master weights the float32 copies of parameters are kept: each is one more state of its parameter, under the name
``master_weight``, so it is sharded, offloaded, saved and loaded as the optimizer's other states are. Without them, and
with stochastic rounding, the copies are made anew in each step.

A parameter that other code has written since the last step differs from its master weight, rounded; the elements that
differ are taken from the parameter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, Optimizer

from lightning_hybrid.errors import PrecisionError
from lightning_hybrid.optimizers.replacement import STEP_HOOKS, Place, only_parameters, replace_step
from lightning_hybrid.optimizers.trial import skips_missing_gradients, steps_independently
from lightning_hybrid.params import store
from lightning_hybrid.patching import replace
from lightning_hybrid.step.standins.tensors import is_absent

MASTER_WEIGHT = "master_weight"  # key of the state
_SUBSET = 2**24  # elements that are stepped at a time, which bounds the memory of copies

Rounding = Callable[[Tensor, Tensor, Tensor], None]  # of a parameter: writes a float32 tensor to one of bfloat16


def round_to_nearest(parameter: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy a value of any shape to a tensor of a lower precision."""
    del parameter
    target.copy_(value)


def check_float32_options(precision: str, *, master_weights: bool, stochastic_rounding: bool) -> None:
    """Check that parameters are rounded in one way, and bfloat16."""
    chosen = [n for n, on in (("master_weights", master_weights), ("stochastic_rounding", stochastic_rounding)) if on]
    if len(chosen) == 2:
        raise PrecisionError(
            "HybridPrecision has master_weights=True, which rounds to the nearest value, and stochastic_rounding=True,"
            " which rounds at random; leave out one of them",
            entry="precision-rounding",
        )
    if chosen and precision != "bf16-true":
        raise PrecisionError(
            f"HybridPrecision({precision!r}) has {chosen[0]}=True, which is for bfloat16 parameters; leave it out, or"
            " set precision='bf16-true'",
            entry="precision-rounding",
        )


class Float32Step:
    """The steps of one optimizer, in float32 where its parameters are bfloat16."""

    def __init__(self, optimizer: Optimizer, *, keeps_masters: bool, rounding: Rounding = round_to_nearest) -> None:
        """Replace the optimizer's ``step`` and ``load_state_dict``.

        With ``keeps_masters`` float32 copies are states of the optimizer; ``rounding`` writes the new values of
        parameters.

        Raises:
            PrecisionError: The optimizer needs a closure.
        """
        if isinstance(optimizer, LBFGS):
            raise PrecisionError(
                "LBFGS runs the training step inside its own step, in which parameters would be float32 while"
                " precision='bf16-true' computes in bfloat16; leave out master_weights and stochastic_rounding, or set"
                " precision='32-true'",
                entry="precision-optimizer",
            )
        self._optimizer, self._keeps_masters, self._rounding = optimizer, keeps_masters, rounding
        self._loss: Any = None  # what the closure has returned, while the optimizer steps
        # A copy of an optimizer that steps on the host is given the parameters of one layer at a time, later.
        self._skips_missing = bool(optimizer.param_groups) and skips_missing_gradients(optimizer)
        self._is_divisible = self._skips_missing and steps_independently(optimizer)
        self._original, self._load_original = optimizer.step, optimizer.load_state_dict
        reason = "steps in float32"
        self._undo = replace_step(optimizer, self._step_after_closure, Place.FLOAT32, reason=reason)
        self._undo_load = replace(optimizer, "load_state_dict", self._load, reason=reason)

    def close(self) -> None:
        """Restore the optimizer's own methods; master weights stay among its states."""
        self._undo()
        self._undo_load()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if not is_absent(p)]

    # -- the step ------------------------------------------------------------------------------------------------------

    def _step_after_closure(self, _: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is None:
            self._step(kwargs)
            return None
        with torch.enable_grad():
            self._loss = closure()
        try:
            self._step(kwargs, has_closure=True)
            return self._loss
        finally:
            self._loss = None

    @torch.no_grad()
    def _step(self, kwargs: dict[str, Any], *, has_closure: bool = False) -> None:
        with torch._C.DisableTorchFunction():
            parameters = self._parameters()
            if self._skips_missing:
                parameters = [p for p in parameters if p.grad is not None]
        has_hooks = any(self._optimizer.__dict__.get(name) for name in STEP_HOOKS)
        if not self._is_divisible or has_hooks or sum(p.numel() for p in parameters) <= _SUBSET:
            self._step_subset(parameters, kwargs, has_closure)
            return
        for subset in _subsets(parameters):
            with only_parameters(self._optimizer, set(map(id, subset))):
                self._step_subset(subset, kwargs, has_closure)

    def _step_subset(self, parameters: Sequence[Tensor], kwargs: dict[str, Any], has_closure: bool) -> None:
        masters: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunction():
            originals = [(p, p.data, p.grad) for p in parameters if p.dtype is torch.bfloat16]
        try:
            with torch._C.DisableTorchFunction():  # modes of hooks, which show full parameters
                for p, data, gradient in originals:
                    masters[id(p)] = self._float32_of(p, data)
                    store.swap_in(p, masters[id(p)], None if gradient is None else gradient.float())
            closure = {"closure": self._closure_that_ran(parameters)} if has_closure else {}
            with torch.enable_grad(), _default_float32():
                self._original(**closure, **kwargs)
        finally:
            with torch._C.DisableTorchFunction():
                for p, data, gradient in originals:
                    value = p.data
                    store.swap_out(p, data, gradient)
                    if value.dtype is torch.float32:
                        self._rounding(p, data, value)
                        self._keep(p, masters[id(p)], value)
                increment_version([p for p, *_ in originals])

    def _closure_that_ran(self, parameters: Sequence[Tensor]) -> Callable[[], Any]:
        """The closure as the optimizer may call it: once, before it changes parameters; the loss is known by then."""
        loss, is_called = self._loss, False
        with torch._C.DisableTorchFunction():
            has_hooks = self._optimizer.__dict__.get(STEP_HOOKS[0])  # which may change parameters before the step
            before = [] if has_hooks else [(p, p._version, p.grad) for p in parameters]

        def closure() -> Any:
            nonlocal is_called
            with torch._C.DisableTorchFunction():
                is_changed = any(p._version != version or p.grad is not gradient for p, version, gradient in before)
            if is_called or is_changed:
                name = type(self._optimizer).__name__
                raise PrecisionError(
                    f"{name} runs the training step {'several times' if is_called else 'at changed parameters'} inside"
                    " its own step, in which parameters would be float32 while precision='bf16-true' computes in"
                    " bfloat16; leave out master_weights and stochastic_rounding, or set precision='32-true'",
                    entry="precision-optimizer",
                )
            is_called = True
            return loss

        return closure

    def _float32_of(self, p: Tensor, data: Tensor) -> Tensor:
        """Take the master weight out of the states, or make a copy; widen states that were made for bfloat16."""
        state = self._optimizer.state.get(p, {})
        for name, value in state.items():
            if type(value) is Tensor and value.dtype is torch.bfloat16:
                state[name] = value.float()
        master = state.pop(MASTER_WEIGHT, None)
        if master is None:
            return data.float()
        master = master.to(data.device, torch.float32)
        is_same = data == master.to(data.dtype)
        if data.device.type != "cpu" or not is_same.all():  # a GPU would wait for the answer
            master.copy_(torch.where(is_same, master, data.float()))
        return master

    def _keep(self, p: Tensor, master: Tensor, value: Tensor) -> None:
        """Put the master weight back among the states; an optimizer may have assigned another tensor."""
        if not self._keeps_masters:
            return
        if value.data_ptr() != master.data_ptr():
            master.copy_(value)
        self._optimizer.state[p][MASTER_WEIGHT] = master

    # -- states --------------------------------------------------------------------------------------------------------

    def _load(self, state_dict: Any) -> None:
        with self._float32_dtype():
            self._load_original(state_dict)

    @contextlib.contextmanager
    def _float32_dtype(self) -> Iterator[None]:
        """Inside, parameters have the dtype float32, to which torch converts the states that it loads."""
        originals = [(p, p.data) for p in self._parameters() if p.dtype is torch.bfloat16]
        for p, data in originals:
            store.swap_in(p, torch.zeros((), dtype=torch.float32, device=data.device).expand(data.shape))
        try:
            yield
        finally:
            for p, data in originals:
                store.swap_out(p, data)


@contextlib.contextmanager
def _default_float32() -> Iterator[None]:
    """Inside, new tensors are float32: in manual optimization a step is called where they would be bfloat16.

    The default is that of all threads, so a thread that steps beside the main one does not change it.
    """
    before = torch.get_default_dtype()
    if before is torch.float32 or threading.current_thread() is not threading.main_thread():
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _subsets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in their order, in lists of a limited number of elements, or of one parameter."""
    subset: list[Tensor] = []
    numel = 0
    for p in parameters:
        if subset and numel + p.numel() > _SUBSET:
            yield subset
            subset, numel = [], 0
        subset.append(p)
        numel += p.numel()
    if subset:
        yield subset


def shard_masters(optimizer: Optimizer, shard_of_state: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Shard loaded master weights of full shape where other states stay full, for a step that sees full parameters.

    ``shard_of_state`` returns the local shard of a parameter's state, of any shape.
    """
    for p, entry in optimizer.state.items():
        if MASTER_WEIGHT in entry and not is_absent(entry[MASTER_WEIGHT]):
            entry[MASTER_WEIGHT] = shard_of_state(p, entry[MASTER_WEIGHT])


@torch.no_grad()
def drop_unused_masters(optimizer: Optimizer) -> str:
    """Take loaded master weights out of the states of an optimizer that steps without them.

    Parameters of float32 or more are set to their master weights, which others are the rounded values of.

    Returns:
        What was done, as a clause; empty if there were no master weights.
    """
    is_set = False
    found = [(p, entry.pop(MASTER_WEIGHT)) for p, entry in optimizer.state.items() if MASTER_WEIGHT in entry]
    for p, master in found:
        if p.dtype in (torch.float32, torch.float64) and p.shape == master.shape:
            p.data.copy_(master)
            is_set = True
    if not found:
        return ""
    return "the parameters are set to them" if is_set else "they are dropped, and the rounded parameters stay"
