"""What a recorded step does with values of the model beside its operations: numbers read from them, values kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.absent import AbsentFloat, ControlFlowError, branch_message, values_behind
from lightning_hybrid.step.recording import Recording, StepError
from lightning_hybrid.step.transaction import Place, reachable
from lightning_hybrid.step.watch import StepWatch, user_line


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


# Moderate, so that their exponentials are numbers too.
_PROBES = (300.0, -300.0)


class BranchCheck:
    """Finds branches on numbers read from the model, which Python lets pass once they are plain floats.

    A step that decides by ``float(loss) > 2`` would decide by a NaN where the loss is absent. So a step that reads
    numbers is recorded again with other numbers in their place, and must do the same.
    """

    def __init__(self, root: nn.Module, step: Callable[[], Any]) -> None:
        """Args: root: the user's module. step: runs its step."""
        self._root = root
        self._step = step
        self._plain: dict[Place, Any] = {}

    def step(self) -> Any:
        """The user's step, and what it leaves behind in plain attributes."""
        result = self._step()
        self._plain = {place: leaf for place, leaf in reachable(self._root) if type(leaf) in (bool, int, str)}
        return result

    def check(self, recording: Recording, record_again: Callable[[], Recording]) -> None:
        """Compare a recording with others in which the numbers are not the same.

        Args:
            recording: Of ``step``.
            record_again: Records ``step`` again.

        Raises:
            ControlFlowError: The step does something else when the numbers are others.
        """
        if not recording.numbers_read:
            return
        plain = self._plain
        for probe in _PROBES:
            StepWatch.reads_as = probe
            try:
                other = record_again()
            except (StepError, ArithmeticError, ValueError):
                continue  # the number cannot be this one: math.log(loss.item())
            finally:
                StepWatch.reads_as = None
            same = _operations(other) == _operations(recording)
            if not same or self._plain != plain:
                raise ControlFlowError(branch_message(recording.numbers_read))


def _operations(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    return [(node.name, node.inputs) for node in recording.graph.nodes]


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
