"""Split backwards (zero bubble): gradients of inputs first, gradients of weights when the first have left.

    F   y = x @ weight.T
    I   dx = dy @ weight             goes to the stage before
    W   weight.grad += dy.T @ x      when the rank would wait

These are the parts of zero-bubble schedules (Qi et al. 2023, section 2). Only the product of a linear is left for W;
all else stays in I. A linear is left alone, and its weight has its gradient in I as always, where anything but the sum
in `weight.grad` could see when that sum is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional

from lightning_hybrid.step.instrument.autograd_functions import Unwatched
from lightning_hybrid.step.tracing.step_mode import Current

# Below so many products a linear is done sooner than it is put off: some 0.6 ms of a core of a CPU, 0.02 of a GPU.
FEWEST_PRODUCTS = {"cpu": 2**25, "cuda": 2**32}

_linear_of_torch = torch._C._nn.linear
_task_under_way = torch._C._current_graph_task_id
_function_modes = torch._C._len_torch_function_stack
_hooks_on_saved = torch._C._autograd._top_saved_tensors_default_hooks


class Left(NamedTuple):
    """What is left to do for one use of a weight.

    Attributes:
        weight: Of shape (out, in).
        gradient: Of what the linear gave, of shape (..., out).
        input: What it was given, of shape (..., in).
        version: Of the input then; another one later means that it was written into.
    """

    weight: nn.Parameter
    gradient: Tensor
    input: Tensor
    version: int


class WeightsLater:
    """Backwards of one rank that leave what they can.

    Attributes:
        keeps_all: Whether they leave nothing, since gradients were differentiated: the weights have a gradient by that
            way too, and torch adds both before it adds them to `weight.grad`.
    """

    def __init__(self) -> None:
        """Nothing is left."""
        self.keeps_all = False
        self._current: Current | None = None
        self._is_forward = False
        self._task: int | None = None
        self._left: list[Left] = []

    @contextlib.contextmanager
    def installed(self, current: Current) -> Iterator[None]:
        """Let the linears of units ask whether their weights can wait.

        Args:
            current: Which run of the step is under way.
        """
        if functional.linear is not _linear_of_torch:  # somebody else's: it stays as it is
            yield
            return
        self._current, _Installed.later = current, self
        functional.linear = _linear
        try:
            yield
        finally:
            functional.linear = _linear_of_torch
            self._current = _Installed.later = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A forward whose backward will be split."""
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Left]:
        """Run a backward whose forward said that it will be split, and leave what can be left.

        Args:
            roots: Where it begins.
            gradients: Theirs.

        Returns:
            For `finish`.
        """
        for root in roots:
            if root.grad_fn is not None:
                root.grad_fn.register_prehook(self._note_task)
        try:
            torch.autograd.backward(roots, gradients)
            return self._left
        finally:
            self._task, self._left = None, []

    def _note_task(self, gradients: Any) -> None:
        # User code inside may run backwards of its own, and wants all of what these give.
        self._task = _task_under_way()

    def can_wait(self, input: Tensor, weight: Tensor) -> bool:
        """Whether the forward of a linear should be one that a backward can split."""
        watch = None if self._current is None else self._current.watch
        return (
            self._is_forward
            and watch is not None
            and watch.inside_unit
            and type(weight) is nn.Parameter
            and weight.requires_grad
            and type(input) is Tensor
            and input.dim() > 1
            and input.numel() * weight.shape[0] >= FEWEST_PRODUCTS.get(input.device.type, 2**32)
            and input.dtype is weight.dtype
            and weight.is_floating_point()
            and weight.is_contiguous()
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input.device.type)
            and _task_under_way() == -1  # not a recomputation
            and not _function_modes()
            and _hooks_on_saved(False) is None
            and forward_ad._current_level < 0
            and not torch._C._are_functorch_transforms_active()
        )

    def leave(self, weight: nn.Parameter, gradient: Tensor, input: Tensor) -> bool:
        """Take the gradient of a weight over; False if it must be made now."""
        if self.keeps_all or self._task != _task_under_way() or _is_heard(weight):
            return False
        self._left.append(Left(weight, gradient, input, input._version))
        return True


class _Installed:
    """What `_linear` asks: a function that is always the same one, or torch.compile would compile anew each step."""

    later: WeightsLater | None = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.compiler.is_compiling():
        later = _Installed.later
        if later is not None and later.can_wait(input, weight):
            return _apply(input, weight, bias, later)
    return _linear_of_torch(input, weight, bias)


class _Linear(Unwatched, torch.autograd.Function):
    """A linear whose backward can leave the product for its weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter, bias: Tensor | None, later: WeightsLater) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.later = later
        return _linear_of_torch(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # somebody will differentiate these gradients, as torch does it
            wanted = [one for one, needs in zip((input, weight, bias), needed, strict=True) if needs]
            again = _linear_of_torch(input, weight, bias)
            found = iter(torch.autograd.grad(again, wanted, gradient, create_graph=True))
            ctx.later.keeps_all = True
            of_input, of_weight, of_bias = (next(found) if needs else None for needs in needed)
            return of_input, of_weight, of_bias, None
        of_input = gradient.matmul(weight) if needed[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if needed[2] else None
        if ctx.later.leave(weight, gradient, input):
            return of_input, None, of_bias, None
        return of_input, _product(gradient, input), of_bias, None


# Past `user_functions`, which looks at each call of the user's functions.
_apply = super(_SingleLevelFunction, _Linear).apply


def _is_heard(weight: nn.Parameter) -> bool:
    """Whether somebody is told of a gradient of this weight while a backward runs."""
    told = (weight._post_accumulate_grad_hooks or {}).values()
    return bool(weight._backward_hooks) or not all(getattr(hook, "is_idle", False) for hook in told)


def are_heard(left: Sequence[Left]) -> bool:
    """Whether somebody is told of a gradient of any of these weights by the next backward."""
    return any(_is_heard(one.weight) for one in left)


@torch.no_grad()
def finish(left: Sequence[Left]) -> None:
    """Add to the gradients of weights what a backward has left, to the bits that it would have added.

    Raises:
        RuntimeError: What a linear was given is no longer what it was.
    """
    sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for weight, gradient, input, version in left:
        if input._version != version:
            raise RuntimeError(
                f"the input of a linear, of shape {tuple(input.shape)}, was written in place between its backward and"
                " the gradient of its weight, which schedule='zero_bubble' makes later; write into a copy, or set"
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
        known = weight.grad
        if known is None:
            weight.grad = product
        elif known.layout is torch.strided:
            known.add_(product)
        else:
            weight.grad = product + known  # dense, where a lookup has given a sparse one


def _product(gradient: Tensor, input: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t().mm(input.flatten(0, -2))
