"""A test whether microbatches give the gradients of their batch, for steps whose backward runs code of the user.

An autograd function may add a gradient of its own, and a hook may clip one by its norm: such backwards are not linear,
so their microbatches need not add up to the batch even where the losses do. Both ways to weigh microbatches
(``pipeline.runtime.gradients``) are tried; where neither gives the gradients of the batch, it is not split.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_hybrid.batch.split import copied_batch
from lightning_hybrid.equivalence.deterministic import WithoutDropoutMode
from lightning_hybrid.params.gradient_hooks import without_registrations
from lightning_hybrid.pipeline.logs import LogCapture
from lightning_hybrid.pipeline.runtime.gradients import without_hooks
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.recording.units import has_backward_hooks
from lightning_hybrid.step.tracing.recording import find_loss

# Relative differences of the gradients of a parameter that rounding may cause; other dtypes are too coarse for a test.
_ROUNDING = {torch.float64: 1e-7, torch.float32: 2e-2}
_LEAST = 1e-2  # gradients smaller than this share of the largest are compared with that share


class GradientMatch(NamedTuple):
    """Which weighting of the microbatches' gradients gives the gradients of their batch.

    Attributes:
        of_losses: Whether that of the losses does.
        of_gradients: Whether that of the gradients does.
        norms: The norm of the gradients of the batch, and of those of its microbatches by the better weighting.
    """

    of_losses: bool
    of_gradients: bool
    norms: tuple[float, float]


def compare_gradients(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    parts: Sequence[Any],
    samples: Sequence[float],
    losses: Sequence[float],
    randomness: KeyedRandomness,
    context: Callable[[], AbstractContextManager[Any]],
    around_backward: Callable[[], AbstractContextManager[Any]],
    any_rank: Callable[[bool], bool],
    is_fatal: Callable[[Exception], bool] | None = None,
    *,
    is_nonlinear: bool,
    calls_hooks: bool = False,
) -> GradientMatch | None:
    """Compare gradients of a batch with its parts' gradients; None if the step has no such code, or cannot be compared.

    Collective over the ranks of ``any_rank``: a layer may be gathered from all of them.

    The step runs in training mode without dropout; a step that still draws random numbers is not compared. All its
    effects are rolled back.

    Args:
        root: The user's module; this rank can run it.
        step: The user's step, of a batch.
        batch: The full batch.
        parts: The batch, split.
        samples: The weights of the parts by samples.
        losses: The weights of the losses of the parts.
        randomness: Its generators are restored.
        context: Entered around each run of the step.
        around_backward: Entered around each backward.
        any_rank: Returns whether a condition holds on any rank.
        is_fatal: Whether an error of the step is raised; nothing is compared otherwise, or if None.
        is_nonlinear: Whether the forward leaves code of the user for the backward.
        calls_hooks: Whether hooks on parameters see the gradients of parts; otherwise they see the sum of these.
    """
    parameters = [p for p in root.parameters() if p.requires_grad]
    run = _Run(root, step, context, around_backward, parameters)
    is_nonlinear |= any(map(has_backward_hooks, root.modules()))
    is_nonlinear |= any(getattr(module, "scale_grad_by_freq", False) for module in root.modules())  # of an embedding
    if calls_hooks:
        is_nonlinear |= any(parameter._backward_hooks for parameter in parameters)
    if not any_rank(is_nonlinear and all(samples)):
        return None

    with trained_without_draws(root, randomness, parameters) as undo:
        try:
            with contextlib.nullcontext() if calls_hooks else without_hooks(root):
                return _compare(run.gradients, undo, batch, parts, samples, losses)
        except Exception as error:  # it needs more samples, or more memory than there is
            if is_fatal is not None and is_fatal(error):
                raise
            return None


class _Run(NamedTuple):
    """The user's step on a part of a batch; arguments as for ``compare_gradients``."""

    root: nn.Module
    step: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    around_backward: Callable[[], AbstractContextManager[Any]]
    parameters: Sequence[nn.Parameter]

    def loss(self, part: Any) -> Tensor:
        """The scalar loss."""
        logs = LogCapture(1)
        with torch.enable_grad(), self.context(), logs.microbatch(self.root, 0):
            loss: Tensor = find_loss(self.step(copied_batch(part)))
            if torch.is_autocast_enabled(loss.device.type):
                raise TypeError("gradients of half precision are too coarse for a comparison")
        return loss

    def gradients(self, part: Any, seed: float) -> list[Tensor | None]:
        """The gradients in the shapes of the parameters, if the gradient of the loss is ``seed``."""
        loss = self.loss(part)
        with self.around_backward():
            found = torch.autograd.grad([loss], self.parameters, [torch.full_like(loss, seed)], allow_unused=True)
        return [one if one is None else one.to_dense() if one.is_sparse else one for one in found]


def _compare(
    gradients_of: Callable[[Any, float], list[Tensor | None]],
    undo: Callable[[], bool],
    batch: Any,
    parts: Sequence[Any],
    samples: Sequence[float],
    losses: Sequence[float],
) -> GradientMatch | None:
    full = gradients_of(batch, 1.0)
    dtypes = {gradient.dtype for gradient in full if gradient is not None}
    near = max((_ROUNDING.get(dtype, math.inf) for dtype in dtypes), default=math.inf)
    if not undo() or near == math.inf:
        return None

    def joined(factors: Sequence[float], seeds: Sequence[float]) -> tuple[float, float] | None:
        """The largest relative error of the gradients of a parameter, and the norm of all of them."""
        sums: list[Tensor | None] = [None] * len(full)
        for part, factor, seed in zip(parts, factors, seeds, strict=True):
            for index, one in enumerate(gradients_of(part, seed) if seed else ()):  # else it may have no loss: 0 / 0
                if one is not None:
                    before = sums[index]
                    sums[index] = one * factor if before is None else before + one * factor
            if not undo():
                return None
        largest = max(_norm(one) for one in full)
        errors = [
            _norm(a if b is None else b if a is None else a - b) / (max(_norm(a), _LEAST * largest) or 1.0)
            for a, b in zip(full, sums, strict=True)
        ]
        return max(errors), math.hypot(*map(_norm, sums))

    by_loss = joined([1.0] * len(parts), losses)
    by_gradient = joined(samples, [loss / weight for loss, weight in zip(losses, samples, strict=True)])
    norm = math.hypot(*map(_norm, full))
    if by_loss is None or by_gradient is None or not math.isfinite(norm):
        return None
    nearer = min(by_loss, by_gradient)[1]
    return GradientMatch(by_loss[0] <= near, by_gradient[0] <= near, (norm, nearer))


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.detach().double().norm())


@contextlib.contextmanager
def trained_without_draws(
    root: nn.Module, randomness: KeyedRandomness, parameters: Sequence[nn.Parameter]
) -> Iterator[Callable[[], bool]]:
    """Run steps inside; what is yielded undoes a run, and returns whether it has drawn no random numbers.

    Dropout is off, and layers that normalize over samples use their running statistics.
    """
    norms = [module for module in root.modules() if isinstance(module, _NormBase) and module.training]
    start, gradients = StepSnapshot(root, copied=math.inf), [parameter.grad for parameter in parameters]
    quiet = contextlib.redirect_stdout(io.StringIO())
    with randomness.isolated(), WithoutDropoutMode(), quiet, without_registrations(root):
        before = GeneratorStates(randomness.device)

        def begin() -> None:
            for module in norms:
                module.training = False
            for parameter in parameters:
                parameter.grad = None

        def undo() -> bool:
            start.restore()
            begin()
            return before.are_unchanged()

        begin()
        try:
            yield undo
        finally:
            start.restore()
            for module in norms:
                module.training = True
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def describe_uncompared() -> str:
    """The warning where there is no memory to compare gradients."""
    return (
        "the backward of training_step runs an autograd function or a hook of yours, and there is no memory to compare"
        " the gradients of two samples with those of each: they are trained as if it were linear, or added a gradient"
        " of its own (docs/semantics/losses.md)"
    )


def describe_difference(norms: tuple[float, float]) -> str:
    """The warning about gradients that no weights of microbatches give; ``norms`` as in ``GradientMatch``."""
    return (
        "the backward of training_step runs an autograd function or a hook of yours that is not linear: the norm of the"
        f" gradients of a batch is {norms[0]:.6g}, that of its microbatches or shares {norms[1]:.6g}, and no weights of"
        " these give the former. So batches are not split (docs/semantics/losses.md)"
    )
