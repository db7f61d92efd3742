"""Whether the loss of a batch is the mean of its parts' losses, tried once on a batch without gradients.

It is not where an objective mixes samples (contrastive pairs, a mean over the tokens that labels leave, a term for the
whole batch). Then parts of a batch train another objective than one process does, as gradient accumulation would.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.step_start import StepStart
from lightning_hybrid.step.microbatch import BatchSplitter, split, split_unevenly
from lightning_hybrid.step.randomness import GeneratorStates, KeyedRandomness
from lightning_hybrid.step.recording import find_loss

# Relative differences that rounding may make, by the kind of numbers.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 5e-2


def losses_that_differ(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    count: int,
    splitter: BatchSplitter | None,
    randomness: KeyedRandomness,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[float, float] | None:
    """The loss of a batch and the mean of its parts', if they differ; None also where that cannot be tried.

    Modules evaluate meanwhile, so that they drop nothing and normalize each sample alone; a step that draws random
    numbers even so is not tried, nor one that returns no loss then. Nothing that the step does stays.

    Args:
        root: The user's module; this rank can run it.
        step: The user's step, of a batch.
        batch: The whole batch.
        count: Parts that the batch is cut into.
        splitter: Of the user, for batches.
        randomness: Its generators are left as they were.
        context: Entered around each run of the step.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(randomness.isolated())
        stack.enter_context(_as_it_was(root))
        stack.enter_context(replaced(root, "log", lambda *_, **__: None))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        before = GeneratorStates(randomness.device)
        partitions = [split(batch, count, splitter)]
        if splitter is None:  # what a mean is taken over may be the same number in all parts of one of them
            partitions.append(split_unevenly(batch))
        try:
            found = []
            for part in (batch, *(part for parts, _ in partitions for part in parts)):
                with torch.no_grad(), context():
                    loss = find_loss(step(part))
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    return None
                found.append(loss)
            if not before.still_stand():
                return None
        except Exception:  # the step asks for gradients, or for more memory than there is
            return None
    whole, *of_parts = map(float, found)
    near = _ROUNDING_OF_HALF if torch.is_autocast_enabled() else _ROUNDING.get(found[0].dtype, _ROUNDING_OF_HALF)
    left = iter(of_parts)
    for _, weights in partitions:
        mean = sum(next(left) * weight for weight in weights)
        if math.isfinite(whole) and not math.isclose(whole, mean, rel_tol=near, abs_tol=near * 1e-3):
            return whole, mean
    return None


def describe_mixing(found: tuple[float, float], then: str = "") -> str:
    """What to tell the user of losses that differ.

    Args:
        found: Of a batch, and the mean of its parts'.
        then: What is done about it; nothing by default.
    """
    then = then or "The mean over microbatches is what training minimises, as with gradient accumulation"
    return (
        f"the objective mixes samples: the loss of a batch is {found[0]:.6g}, the mean of the losses of its parts is"
        f" {found[1]:.6g}. {then}. For a mean over what labels or a mask leave, pass"
        " microbatch_weight=function(microbatch) -> count"
    )


@contextlib.contextmanager
def _as_it_was(root: nn.Module) -> Iterator[None]:
    """The modules evaluate inside, and are afterwards as they were before."""
    modes = [(module, module.training) for module in root.modules()]
    start = StepStart(root, copied=math.inf)
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        start.restore()
        for module, mode in modes:
            module.training = mode
