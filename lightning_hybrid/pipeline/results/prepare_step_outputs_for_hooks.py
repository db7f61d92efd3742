"""Outputs of a step, as hooks and prediction receive them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hybrid.errors import StepError
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.numbers import has_absent_content, line_of_read
from lightning_hybrid.step.standins.tensors import is_absent


def detached(leaf: Any) -> Any:
    """A leaf of an output, detached; None where its content was not requested."""
    if isinstance(leaf, Tensor):
        return None if is_absent(leaf) else leaf.detach()
    return leaf


def returned_batch(batch: Any, microbatches: Sequence[Any], results: Sequence[Any], output: Any) -> Any:
    """The output of a step; if it returns its own batch, the full batch updated with the joined entries.

    Args:
        batch: The full batch.
        microbatches: The microbatches on which the step ran.
        results: The return value for each.
        output: The return values, joined.
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
    """Check that no stand-in reaches user code.

    Args:
        step: Name of the step.
        output: Its return values, joined.

    Raises:
        StepError: A number is on another rank only.
    """
    for leaf in flatten(output)[0]:
        if has_absent_content(leaf):
            raise StepError(
                f"{line_of_read(leaf, step)}: {step} returns a number read from the model that is not known for the"
                " full batch; return the tensor instead (loss.detach()), or set num_microbatches=1",
                entry="outputs-number",
            )
