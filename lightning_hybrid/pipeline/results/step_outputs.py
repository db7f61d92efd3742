"""Outputs of a step: what hooks and prediction get of the microbatches' results."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_arrays import is_number_of_others, line_read_at
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError


def detached(leaf: Any) -> Any:
    """A leaf of an output without its graph; None where its content was not asked for."""
    if isinstance(leaf, Tensor):
        return None if is_absent(leaf) else leaf.detach()
    return leaf


def handed_back(batch: Any, microbatches: Sequence[Any], results: Sequence[Any], output: Any) -> Any:
    """What a step returns that returns its own batch, with what it has put there: the batch, with the same.

    Args:
        batch: The whole batch.
        microbatches: What the step ran on.
        results: What it returned for each.
        output: These, joined.
    """
    if not all(result is microbatch for result, microbatch in zip(results, microbatches, strict=True)):
        return output
    if isinstance(batch, MutableMapping):
        batch.update(output)
        return batch
    if not isinstance(batch, Tensor) and hasattr(batch, "__dict__"):
        vars(batch).update(vars(output))
        return batch
    return output


def check_content(step: str, output: Any) -> None:
    """See that no stand-in reaches the user.

    Args:
        step: Its name.
        output: What it returned, joined.

    Raises:
        StepError: A number is not known on this rank.
    """
    for leaf in flatten(output)[0]:
        if is_number_of_others(leaf):
            raise StepError(
                f"{line_read_at(leaf, step)}: {step} returns a number read from the model that is not known for the"
                " whole batch; return the tensor instead (loss.detach()), or set num_microbatches=1"
            )
