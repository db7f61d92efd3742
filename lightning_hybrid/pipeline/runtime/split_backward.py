"""Split backwards (zero bubble): gradients of inputs first, gradients of weights once the first have been sent.

    F   y = x @ weight.T
    I   dx = dy @ weight             goes to the stage before
    W   weight.grad += dy.T @ x      when the rank would wait

These are the passes of zero-bubble schedules (Qi et al. 2023, section 2). Only the matrix product of a linear is
deferred to W; all else stays in I. A linear is unchanged, and its weight gets its gradient in I, where anything but
the sum in `weight.grad` could observe when that sum is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.objects.tensors import gradient_dtype
from lightning_hybrid.step.tracing.deferral import active, deferrals
from lightning_hybrid.step.tracing.functions import NotIntercepted
from lightning_hybrid.step.tracing.mode import CurrentRun

# Below so many multiplications, deferring costs more than the product: some 0.6 ms of a CPU core, 0.02 of a GPU.
MIN_PRODUCTS_TO_DEFER = {"cpu": 2**25, "cuda": 2**32}

_torch_linear = torch._C._nn.linear
_current_task = torch._C._current_graph_task_id
_function_modes = torch._C._len_torch_function_stack
_hooks_on_saved = torch._C._autograd._top_saved_tensors_default_hooks


class DeferredGradient(NamedTuple):
    """The deferred gradient of one use of a weight."""

    weight: nn.Parameter  # the weight, of shape (out, in)
    gradient: Tensor  # the gradient of the output, of shape (..., out)
    input: Tensor  # the input of the linear, of shape (..., in)
    version: int  # version counter of the input; a different one later means that it was written in place


class SplitBackward:
    """Runs backwards of one rank, and defers gradients of weights.

    Attributes:
        is_disabled: Whether nothing is deferred, since gradients were differentiated: the weights then have a second
            gradient, and torch adds both before it adds them to `weight.grad`.
    """

    def __init__(self) -> None:
        """Begin with no deferred gradient."""
        self.is_disabled = False
        self._current: CurrentRun | None = None
        self._is_forward = False
        self._task: int | None = None
        self._deferred: list[DeferredGradient] = []

    @contextlib.contextmanager
    def instrumented(self, current: CurrentRun) -> Iterator[None]:
        """Replace ``functional.linear``, so that linears of units can defer the gradients of their weights."""
        if functional.linear is not _torch_linear:  # another library has replaced it: it stays as it is
            yield
            return
        self._current = current
        try:
            with replaced(functional, "linear", _linear, reason="split backward"), active(self):
                yield
        finally:
            self._current = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Mark a forward whose backward will be split."""
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    def backward(
        self,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        run: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch.autograd.backward,
    ) -> list[DeferredGradient]:
        """Run the backward of a forward marked by ``forward``, by ``run``; returns deferred gradients of weights.

        It starts from ``roots`` of any shapes, and ``gradients`` of their shapes.
        """
        for root in roots:
            if root.grad_fn is not None:
                root.grad_fn.register_prehook(self._record_task)
        try:
            run(roots, gradients)
            return self._deferred
        finally:
            self._task, self._deferred = None, []

    def _record_task(self, gradients: Any) -> None:
        # User code inside may run nested backwards, which must not be split.
        self._task = _current_task()

    def can_defer(self, input: Tensor, weight: Tensor) -> bool:
        """Whether a backward can defer the gradient of a linear's weight (out, in), whose input is (..., in)."""
        watch = None if self._current is None else self._current.watch
        return (
            self._is_forward
            and watch is not None
            and watch.inside_unit
            and type(weight) is nn.Parameter
            and weight.requires_grad
            and type(input) is Tensor
            and input.dim() > 1
            and input.numel() * weight.shape[0] >= MIN_PRODUCTS_TO_DEFER.get(input.device.type, 2**32)
            and input.dtype is weight.dtype
            and weight.is_floating_point()
            and weight.is_contiguous()
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input.device.type)
            and _current_task() == -1  # not a recomputation
            and not _function_modes()
            and _hooks_on_saved(False) is None
            and forward_ad._current_level < 0
            and not torch._C._are_functorch_transforms_active()
        )

    def defer(self, weight: nn.Parameter, gradient: Tensor, input: Tensor) -> bool:
        """Defer the gradient of a weight, in the shapes of `DeferredGradient`; False if it must be computed now."""
        if self.is_disabled or self._task != _current_task() or _has_hooks(weight):
            return False
        self._deferred.append(DeferredGradient(weight, gradient, input, input._version))
        return True


# It stays the same function, or torch.compile would recompile.
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.compiler.is_compiling():
        for later in deferrals(input, weight):
            return _apply(input, weight, bias, later)
    return _torch_linear(input, weight, bias)


class _Linear(NotIntercepted, torch.autograd.Function):
    """A linear whose backward can defer the product for its weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter, bias: Tensor | None, later: SplitBackward) -> Tensor:
        """Multiply an input of shape (..., in) and a weight of shape (out, in)."""
        ctx.save_for_backward(input, weight, bias)
        ctx.later = later
        return _torch_linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """The gradients of input, weight and bias, in their shapes; None for a weight that is deferred."""
        input, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # these gradients will be differentiated (double backward)
            wanted = [one for one, needs in zip((input, weight, bias), needed, strict=True) if needs]
            product = _torch_linear(input, weight, bias)
            found = iter(torch.autograd.grad(product, wanted, gradient, create_graph=True))
            ctx.later.is_disabled = True
            of_input, of_weight, of_bias = (next(found) if needs else None for needs in needed)
            return of_input, of_weight, of_bias, None
        of_input = gradient.matmul(weight) if needed[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if needed[2] else None
        if ctx.later.defer(weight, gradient, input):
            return of_input, None, of_bias, None
        return of_input, _product(gradient, input), of_bias, None


# Bypasses `intercept_autograd_functions`, which patches ``apply`` to observe the user's functions.
_apply = super(_SingleLevelFunction, _Linear).apply


def _has_hooks(weight: nn.Parameter) -> bool:
    """Whether a hook is called with the gradient of this weight while a backward runs."""
    hooks = (weight._post_accumulate_grad_hooks or {}).values()
    return bool(weight._backward_hooks) or not all(getattr(hook, "is_idle", False) for hook in hooks)


def have_hooks(deferred: Sequence[DeferredGradient]) -> bool:
    """Whether the next backward calls hooks with the gradient of any of these weights."""
    return any(_has_hooks(one.weight) for one in deferred)


@torch.no_grad()
def finish(deferred: Sequence[DeferredGradient]) -> None:
    """Add deferred gradients to `weight.grad`, bit for bit as the backward would have done."""
    sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for weight, gradient, input, version in deferred:
        if input._version != version:
            raise RuntimeError(
                f"the input of a linear, of shape {tuple(input.shape)}, was written in place between its backward and"
                " the gradient of its weight, which this schedule computes later; write into a copy, or set"
                " schedule='1f1b'"
            )
        if gradient.is_cuda:
            for tensor in (gradient, input):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        product = _product(gradient, input)
        if id(weight) in sums:
            product += sums[id(weight)][1]
        sums[id(weight)] = weight, product
    for weight, product in sums.values():
        earlier = weight.grad
        if earlier is None:
            weight.grad = product.to(gradient_dtype(weight))
        elif earlier.layout is torch.strided:
            earlier.add_(product)
        else:
            weight.grad = product + earlier  # dense, where an embedding lookup has a sparse gradient


def _product(gradient: Tensor, input: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t().mm(input.flatten(0, -2))
