"""What the loss of a step on real values is a mean over, read off its autograd graph.

The same that ``step.averages`` sees in a recording, for steps that are not recorded: a loss is followed back through
sums, constant factors and copies to the means that it is made of, each with what it was divided by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SAME = frozenset({"CloneBackward", "ToCopyBackward", "ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward"}) | {
    "SqueezeBackward",
    "UnsqueezeBackward",
    "AliasBackward",
}
_CLASSES = frozenset({"NllLossBackward", "NllLoss2DBackward"})
_ELEMENTS = frozenset(
    {"MseLossBackward", "L1LossBackward", "SmoothL1LossBackward", "HuberLossBackward", "BinaryCrossEntropyBackward"}
    | {"BinaryCrossEntropyWithLogitsBackward", "SoftMarginLossBackward"}
)
_MEAN, _SUM = 1, 2  # ATen's numbers of a reduction


class Term(NamedTuple):
    """One mean in a loss.

    Attributes:
        factor: By which it enters the loss.
        weight: What it was divided by: elements, labels that count, the sum of their weights.
        node: Of the autograd graph, whose gradient is that of the mean.
    """

    factor: float
    weight: float
    node: Any


def means_in(loss: Tensor) -> list[Term] | None:
    """The means that a loss is a sum of; None if it is made of something else too.

    Args:
        loss: With its graph.
    """
    if loss.grad_fn is None:
        return None
    found: list[Term] = []
    return found if _follow(loss.grad_fn, 1.0, None, found) else None


def weights_by_count(microbatches: Sequence[list[Term] | None]) -> list[float] | None:
    """Weights that make the mean over microbatches that over the batch; None if no such weights are known.

    Args:
        microbatches: What ``means_in`` says of each. Their terms must have their counts in one proportion.
    """
    known = [terms for terms in microbatches if terms]
    if len(known) < len(microbatches) or len({len(terms) for terms in known}) != 1:
        return None
    shares: list[list[float]] = []
    for column in zip(*known, strict=True):
        total = sum(term.weight for term in column)
        if not total or any(term.factor != column[0].factor for term in column):
            return None
        shares.append([term.weight / total for term in column])
    for share in shares[1:]:
        if any(not math.isclose(one, first, rel_tol=1e-9) for one, first in zip(share, shares[0], strict=True)):
            return None
    return shares[0]


def _follow(node: Any, factor: float, divided: tuple[float, Any] | None, found: list[Term]) -> bool:
    """Follow a gradient back; ``divided`` is what a number was divided by on the way, and where."""
    name = node.name().rstrip("0123456789")
    inner = [following for following, _ in node.next_functions if following is not None]
    if name in ("AddBackward", "SubBackward"):
        signs = [1.0, -1.0 if name == "SubBackward" else 1.0]
        scales = [1.0, float(node._saved_alpha)] if hasattr(node, "_saved_alpha") else [1.0, 1.0]
        if divided is not None and len(inner) > 1:
            return False
        sides = zip(node.next_functions, signs, scales, strict=False)
        return all(_follow(n, factor * s * a, divided, found) for (n, _), s, a in sides if n is not None)
    if name in _SAME or name == "NegBackward":
        return _follow(inner[0], -factor if name == "NegBackward" else factor, divided, found)
    if name in ("MulBackward", "DivBackward") and len(inner) == 1:
        number = _number(getattr(node, "_saved_other", None))
        number = _number(getattr(node, "_saved_self", None)) if number is None else number
        if number is None or not number:
            return False
        if name == "DivBackward":
            return divided is None and _follow(inner[0], factor, (number, node), found)
        return _follow(inner[0], factor * number, divided, found)
    return _ends(name, node, factor, divided, found)


def _ends(name: str, node: Any, factor: float, divided: tuple[float, Any] | None, found: list[Term]) -> bool:
    """Whether a node is a mean, or a sum that was divided."""
    reduction = getattr(node, "_saved_reduction", None)
    if (name == "SumBackward" and not hasattr(node, "_saved_dim")) or reduction == _SUM:
        if divided is None:
            return False
        found.append(Term(factor, *divided))
        return True
    if name in _CLASSES and reduction == _MEAN:
        count = float(node._saved_total_weight)
    elif name in _ELEMENTS and reduction == _MEAN:
        count = float(node._saved_self.numel())
    elif name == "MeanBackward" and not hasattr(node, "_saved_dim"):
        count = float(node._saved_self_sym_numel)
    else:
        return False
    found.append(Term(factor / (1.0 if divided is None else divided[0]), count, node))
    return True


def _number(value: Any) -> float | None:
    """A constant factor; one that needs a gradient is none."""
    if isinstance(value, Tensor):
        return None if value.numel() != 1 or value.requires_grad else float(value.to(torch.float64))
    return float(value) if isinstance(value, int | float) else None
