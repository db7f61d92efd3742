"""What a recorded step does with values of the model beside its operations: numbers read from them, values kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.absent import AbsentFloat, values_behind
from lightning_hybrid.step.recording import StepError
from lightning_hybrid.step.transaction import Place, reachable
from lightning_hybrid.step.watch import user_line


def numbers_among(leaves: list[Any], read_at: str) -> tuple[int, ...]:
    """The values behind the numbers that an operation is given.

    Args:
        leaves: Of its arguments.
        read_at: Where a number was read last; empty if none was.

    Raises:
        StepError: It cannot be known which values are behind a number.
    """
    known = [values for leaf in leaves if (values := values_behind(leaf)) is not None]
    lost = [leaf for leaf in leaves if type(leaf) is float and math.isnan(leaf) and values_behind(leaf) is None]
    if read_at and lost:
        raise StepError(
            f"{user_line()}: an operation is given a number that was computed from one read from the model ({read_at});"
            " other pipeline stages do not have it: compute it with torch functions on tensors"
        )
    return tuple(sorted(frozenset[int]().union(*known)))


def find_kept(root: nn.Module, mark_of: Callable[[Tensor], int | None], read_at: str) -> list[tuple[Place, int]]:
    """Where values of the step stay reachable from the modules.

    Args:
        root: The user's module, as the step left it.
        mark_of: The value that a tensor is.
        read_at: Where a number was read last.

    Raises:
        StepError: A number is kept, which other stages do not have.
    """
    kept = []
    for place, leaf in reachable(root):
        if values_behind(leaf) is not None:
            line = leaf.line if isinstance(leaf, AbsentFloat) else read_at
            raise StepError(
                f"{line}: {place} keeps a number read from the model, which other pipeline stages do not"
                " have; keep the tensor instead (loss.detach()): it is filled in on every rank after the step"
            )
        if isinstance(leaf, FakeTensor) and (value := mark_of(leaf)) is not None:
            kept.append((place, value))
    return kept
