"""What the backwards of microbatches add to the gradients of parameters: by which weight, and where hooks see it.

The loss of a microbatch is weighted in one of two places. Usually it is its gradient, from which the backward starts.
But an autograd function of the user may add a gradient of its own (that of a router's auxiliary loss), which ignores
the incoming one: it would count once per microbatch. So where a step applies such functions, its backward starts from
the gradient of the unweighted loss, and what arrives at a parameter is weighted::

    weight * (d loss / d x) -> ...            function adds c         -> ... -> p.grad    c in full from each microbatch
             (d loss / d x) -> ...            function adds c         -> ... -> * weight -> p.grad

A hook that the user has registered on a parameter, also after the accumulation, sees its gradient once per step, as
without microbatches: that of all microbatches, in the backward of the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.params.gradient_hooks import StepHooks
from lightning_hybrid.pipeline.runtime.old_gradients import OldGradients, completing
from lightning_hybrid.step.objects.modules import modules_in, parameters_of
from lightning_hybrid.step.objects.tensors import GradientHook, gradient_dtype, gradient_hooks
from lightning_hybrid.step.standins.tensors import is_absent


def split_weight(of_loss: float, of_gradients: float, *, scales: bool | None) -> tuple[float, float]:
    """The gradient from which the backward of a microbatch starts, and the factor of what arrives at parameters."""
    if not of_loss:
        return 1.0, 0.0
    return (of_loss / of_gradients, of_gradients) if scales and of_gradients else (of_loss, 1.0)


@contextlib.contextmanager
def without_hooks(root: nn.Module) -> Iterator[None]:
    """Take hooks of the user off the parameters inside."""
    with torch._C.DisableTorchFunction():
        taken = [
            (hooks, key, hooks[key]) for p in _present(root) for hooks in gradient_hooks(p) for key in _of_user(hooks)
        ]
    for hooks, key, _ in taken:
        hooks[key] = _nothing
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


@dataclass
class _Hooked:
    """A parameter with hooks of the user."""

    parameter: nn.Parameter  # the parameter
    sum: Tensor | None = None  # the gradient of the microbatches so far; None if there is none
    stage: int = 0  # the stage whose backward has added to it last
    handle: torch.utils.hooks.RemovableHandle = field(init=False)  # of the hook that adds, before all others


@dataclass
class _OfStep:
    """A hook of a step; ``of_user`` is the user's, whose place it has."""

    call: Callable[[Tensor], Any]
    of_user: Callable[[Tensor], Any] | None = None

    def __call__(self, tensor: Tensor) -> Any:
        return self.call(tensor)


class ParameterGradients:
    """Weighs gradients where they arrive at parameters, and calls hooks of the user on their sum, in one step.

    Attributes:
        root: The user's module.
        registered: The hooks that the step registers itself.
    """

    def __init__(self, root: nn.Module, has_parts: bool) -> None:
        """Take over from the hooks of the user on parameters, if this rank runs all of several parts of a batch."""
        self.root, self._factor, self._stage, self._is_last = root, 1.0, 0, True
        self._has_parts, self._parameters = has_parts, _present(root)
        self._scaling: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._hooked: dict[int, _Hooked] = {}
        self.registered = StepHooks(root)

    @cached_property
    def has_hooks(self) -> bool:
        """Whether hooks of the user run in backwards: on parameters or modules."""
        of_modules = any(module._backward_hooks or module._backward_pre_hooks for _, module in modules_in(self.root))
        return of_modules or any(
            _of_user(hooks) or _of_step(hooks) for p in self._parameters for hooks in gradient_hooks(p)
        )

    def hooked(self) -> list[nn.Parameter]:
        """The parameters with hooks of the user; in a backward inside of ``by``."""
        if self._has_parts:
            return [hooked.parameter for hooked in self._hooked.values()]
        return [p for p in self._parameters if any(map(_of_user, gradient_hooks(p)))]

    @contextlib.contextmanager
    def by(self, factor: float, stage: int = 0, *, is_last: bool) -> Iterator[None]:
        """Run a backward of a stage inside; what it adds to gradients of parameters is multiplied by ``factor``."""
        with torch._C.DisableTorchFunction():
            for parameter in self._parameters:
                self._take_over(parameter)
            if factor != 1.0 and not self._scaling:
                for parameter in self._parameters:
                    if parameter.requires_grad and id(parameter) not in self._hooked:
                        self._scaling[id(parameter)] = parameter.register_hook(_OfStep(self._scaled))
        self._factor, self._stage, self._is_last = factor, stage, is_last
        try:
            yield
        finally:
            self._factor = 1.0
        if is_last:
            self._complete(stage)

    def _take_over(self, parameter: nn.Parameter) -> None:
        """Let hooks of the user run in the last backward only, those after the accumulation before all of ours."""
        _, after = gradient_hooks(parameter)
        for key in [key for key, hook in after.items() if isinstance(hook, GradientHook)] if _of_user(after) else []:
            after[key] = after.pop(key)  # it may take the gradient away
        if not self._has_parts:
            return
        new = [(hooks, key) for hooks in gradient_hooks(parameter) for key in _of_user(hooks)]
        for hooks, key in new:
            hooks[key] = _OfStep(partial(self._in_last_backward, hooks[key]), hooks[key])
        if new and id(parameter) not in self._hooked:
            if id(parameter) in self._scaling:
                self._scaling.pop(id(parameter)).remove()
            self._hooked[id(parameter)] = hooked = _Hooked(parameter)
            hooked.handle = parameter.register_hook(_OfStep(partial(self._collected, hooked)))
            hooks = gradient_hooks(parameter)[0]
            for key in list(hooks)[:-1]:  # the others get what it returns
                hooks[key] = hooks.pop(key)

    def _in_last_backward(self, hook: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        return hook(tensor) if self._is_last else None

    def _scaled(self, gradient: Tensor) -> Tensor:
        if not self._factor:  # such a microbatch may have no loss: 0 / 0
            return torch.zeros_like(gradient)
        return gradient if self._factor == 1.0 else gradient * self._factor

    def _collected(self, hooked: _Hooked, gradient: Tensor) -> Tensor:
        scaled = self._scaled(gradient)
        total = scaled if hooked.sum is None else hooked.sum + scaled
        hooked.sum, hooked.stage = None if self._is_last else total, self._stage
        return total if self._is_last else torch.zeros_like(gradient)

    @torch.no_grad()
    def _complete(self, stage: int) -> None:
        """Complete the gradients of parameters that the last microbatch has not used."""
        for hooked in self._hooked.values():
            if hooked.sum is not None and hooked.stage == stage:
                total, hooked.sum, parameter = hooked.sum, None, hooked.parameter
                before, after = ([hook.of_user for hook in _of_step(hooks)] for hooks in gradient_hooks(parameter))
                for hook in filter(None, before):
                    changed = hook(total)
                    total = total if changed is None else changed
                with torch._C.DisableTorchFunctionSubclass():  # the gradient is that of what this rank holds
                    parameter.grad = total if parameter.grad is None else parameter.grad + total
                with completing():
                    for hook in filter(None, after):
                        hook(parameter)

    def close(self) -> None:
        """Give the hooks back to the parameters, at the end of a step."""
        self.registered.close()
        for handle in [*self._scaling.values(), *(hooked.handle for hooked in self._hooked.values())]:
            handle.remove()
        for hooked in self._hooked.values():
            with torch._C.DisableTorchFunction():
                for hooks in gradient_hooks(hooked.parameter):
                    hooks.update({key: hook.of_user for key, hook in hooks.items() if isinstance(hook, _OfStep)})
        self._scaling, self._hooked = {}, {}


def _present(root: nn.Module) -> list[nn.Parameter]:
    with torch._C.DisableTorchFunction():
        return [parameter for _, parameter in parameters_of(modules_in(root)) if not is_absent(parameter)]


def _of_user(hooks: dict[int, Any]) -> list[int]:
    return [key for key, hook in hooks.items() if not isinstance(hook, GradientHook | _OfStep)]


def _of_step(hooks: dict[int, Any]) -> list[_OfStep]:
    return [hook for hook in hooks.values() if isinstance(hook, _OfStep)]


def _nothing(_: Tensor) -> None:
    """A hook that changes nothing."""


class GradientHandoff:
    """The gradients of one step, stored until Lightning's backward.

    Attributes:
        old: The gradients that ``zero_grad`` clears before that.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        zeroed_before_backward: bool,
        expected_seed: float,
        shown: bool = True,
        can_roll_back: bool = False,
        summed_later: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        """Begin a step.

        Args:
            parameters: The parameters that this rank trains.
            zeroed_before_backward: Whether ``zero_grad`` comes between the step and its backward.
            expected_seed: The gradient of the loss from which the step's backward started; Lightning's must equal it.
            shown: Whether user code may read the old gradients before they are cleared; otherwise their memory is
                freed before the step needs it.
            can_roll_back: Whether the step may be rolled back, which restores the gradients of earlier batches.
            summed_later: Parameters whose gradients are summed over several ranks after a later batch, with the number
                of ranks. Their sum of an earlier step, where ``zero_grad`` keeps it, is divided by that number.
        """
        self._parameters = parameters
        self._summed_later = summed_later or {}
        self._zeroed_later = zeroed_before_backward
        self._seeded, self._is_known = expected_seed, False
        self._before: list[Tensor | None] = []
        self._new: list[Tensor | None] = []
        self.old = OldGradients(parameters if zeroed_before_backward else ())
        if zeroed_before_backward:
            # Copies: the reducer writes this step's averages into the buffers of the step before.
            grads = [parameter.grad for parameter in parameters]
            self._before = [grad.clone() if shown and grad is not None else None for grad in grads]
            for parameter in parameters:
                parameter.grad = None
        elif can_roll_back:
            self._before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]

    def undo(self) -> None:
        """Roll back the step: restore the gradients of earlier batches, if it may have changed them."""
        if self._before:
            for parameter, gradient in zip(self._parameters, self._before, strict=True):
                parameter.grad = gradient
        self._before = []

    def wrap(self, loss: Tensor) -> Tensor:
        """End the step: restore the old gradients, and return a scalar loss whose backward deposits the new ones."""
        if self._zeroed_later:
            self._new = [parameter.grad for parameter in self._parameters]
            for parameter, grad in zip(self._parameters, self._before, strict=True):
                parameter.grad = grad
            self._before = []
        anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
        return _HandoffFunction.apply(loss, anchor, self)

    def expect(self) -> None:
        """Deposit the gradients for the expected gradient of the loss, which the host need not read."""
        self._is_known = True

    def deposit(self, incoming: Tensor) -> None:
        """Add the gradients to ``.grad``, scaled by the loss's incoming gradient, a scalar, over the expected one."""
        factor = 1.0 if self._is_known else float(incoming) / self._seeded
        exact = abs(factor - 1.0) < 1e-6
        if not self._zeroed_later:
            if not exact:
                raise RuntimeError(
                    f"the loss was scaled by {float(incoming)} before its backward where {self._seeded} was expected;"
                    " with accumulate_grad_batches and pipeline stages scale it inside training_step"
                )
            return
        for parameter, num_ranks in self._summed_later.items():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / num_ranks
        for parameter, grad in zip(self._parameters, self._new, strict=True):
            if grad is not None:
                if not exact:
                    grad = grad * factor
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self._new = []


class _HandoffFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, loss: Tensor, anchor: Tensor, owner: GradientHandoff
    ) -> Tensor:
        """Return the scalar loss, which depends on the scalar ``anchor`` too."""
        del anchor
        ctx.owner = owner  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *incoming: Tensor) -> tuple[None, Tensor, None]:
        """Deposit the gradients; a scalar zero goes to ``anchor``."""
        ctx.owner.deposit(incoming[0])  # type: ignore[attr-defined]
        return None, torch.zeros_like(incoming[0]), None


def expect_seed(loss: Tensor) -> None:
    """Let the host not read the gradient of a step's scalar loss, which Lightning has only divided."""
    divided = None if loss.grad_fn is None else loss.grad_fn.next_functions[0][0]
    owner = getattr(divided, "owner", None)
    if isinstance(owner, GradientHandoff):
        owner.expect()


_MESSAGE_ELEMENTS = 1 << 24


class TiedParameters:
    """The parameters that this rank owns together with other ranks."""

    def __init__(
        self, holders: Mapping[str, Sequence[int]], parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        """Set up from the owner ranks (``holders``) and parameters by FQN, and the ranks of this pipeline."""
        self._group = group
        self._rank = group.rank()
        sets: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for name in sorted(holders):
            ranks = tuple(sorted(set(holders[name])))
            if len(ranks) > 1 and self._rank in ranks:
                sets.setdefault((ranks, parameters[name].dtype), []).append(parameters[name])
        self._sets = [
            (ranks, members)
            for (ranks, _), together in sets.items()
            for members in in_messages(together, [parameter.numel() for parameter in together])
        ]

    def num_owners(self) -> dict[nn.Parameter, int]:
        """Returns how many ranks sum their gradients of each parameter."""
        return {parameter: len(ranks) for ranks, members in self._sets for parameter in members}

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over its owners, added in the order of their ranks on every one.

        A gradient that is None on all owners stays None.
        """
        for ranks, members in self._sets:
            is_complete = all(parameter.grad is not None for parameter in members)
            total = self._total(ranks, _flatten(members, self._group))
            present = [1.0] * len(members) if is_complete else total[-len(members) :].tolist()
            _unflatten(total, present, members)

    def _total(self, ranks: Sequence[int], local: Tensor) -> Tensor:
        """The sum of the vectors of some ranks, this one among them.

        Of more than two, each rank sums a piece and sends that to the others.
        """
        if len(ranks) == 2:
            (other,) = set(ranks) - {self._rank}
            received = self._swap({other: local}, {other: torch.empty_like(local)})
            return _sum(ranks, {self._rank: local, **received})
        pieces = dict(zip(ranks, local.clone().tensor_split(len(ranks)), strict=True))
        own = pieces.pop(self._rank)
        received = self._swap(pieces, {rank: torch.empty_like(own) for rank in pieces})
        own.copy_(_sum(ranks, {self._rank: own, **received}))
        sums = self._swap(dict.fromkeys(pieces, own), pieces)
        return torch.cat([own if rank == self._rank else sums[rank] for rank in ranks])

    def _swap(self, sent: Mapping[int, Tensor], received: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send each other rank a tensor, and fill those that come from them."""
        works = []
        # NCCL runs the transfers of two ranks one after the other, and a send waits for its receive: the lower
        # rank sends first, and all ranks process the pairs in one order.
        for rank, message in sent.items():
            to = partial(dist.isend, message, group=self._group, group_dst=rank)
            back = partial(dist.irecv, received[rank], group=self._group, group_src=rank)
            works += [to(), back()] if self._rank < rank else [back(), to()]
        for work in works:
            assert work is not None
            work.wait()
        return received


def _sum(ranks: Sequence[int], vectors: Mapping[int, Tensor]) -> Tensor:
    """The sum in the order of the ranks, which is the same on each."""
    total = vectors[ranks[0]].clone()
    for rank in ranks[1:]:
        total += vectors[rank]
    return total


Member = TypeVar("Member")


def in_messages(members: Sequence[Member], sizes: Sequence[int]) -> list[list[Member]]:
    """Group parameters of these numbers of elements for messages whose copies take little memory."""
    groups: list[list[Member]] = [[]]
    left = _MESSAGE_ELEMENTS
    for member, size in zip(members, sizes, strict=True):
        if size > left and groups[-1]:
            groups.append([])
            left = _MESSAGE_ELEMENTS
        groups[-1].append(member)
        left -= size
    return groups


def _flatten(members: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """All gradients in one vector (some may be offloaded to the host), then a flag per parameter: if it has one."""
    dtype = gradient_dtype(members[0])
    flat = [p.new_zeros(p.numel(), dtype=dtype) if p.grad is None else p.grad.detach().reshape(-1) for p in members]
    flat.append(torch.tensor([p.grad is not None for p in members], dtype=dtype))
    sent = [on_group_device(gradient, group) for gradient in flat]
    return torch.cat([gradient.to(sent[0].device) for gradient in sent])


def _unflatten(total: Tensor, present: Sequence[float], members: Sequence[nn.Parameter]) -> None:
    start = 0
    for parameter, has in zip(members, present, strict=True):
        gradient = total[start : start + parameter.numel()]
        start += parameter.numel()
        parameter.grad = gradient.view(parameter.shape).to(parameter.device, copy=True) if has else None
