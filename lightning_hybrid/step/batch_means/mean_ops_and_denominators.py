"""Operations that average over labels or masks of the batch, and their denominators.

``cross_entropy`` divides by the number of labels that are not ignored, or by the sum of their class weights; other code
divides a sum by a number computed from the batch. The mean over a batch is then no mean over its microbatches, but each
of these has a *count* by which its mean is weighted: ``mean = sum(mean_i * count_i) / count``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.graph.step_graph import Averages
from lightning_hybrid.step.objects.pytree import flatten

_BY_CLASS = frozenset({"cross_entropy", "nll_loss"})
_BY_ELEMENT = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
    | {"kl_div", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss"}
)
DIVISIONS = frozenset({"div", "divide", "true_divide", "__truediv__"})
PRODUCTS = DIVISIONS | {"mul", "multiply", "__mul__", "__rmul__"}
_PICKS = frozenset({"__getitem__", "masked_select"})


class Share(NamedTuple):
    """The weight of a mean over a microbatch in that over the batch.

    Attributes:
        factor: Factor of its value.
        divisor: Divisor of its sum.
    """

    factor: float
    divisor: float


def averages(name: str, args: Any, kwargs: Any, is_model: Callable[[Any], bool], *, numbers_read: bool) -> Averages:
    """Classify what an operation of a step averages over.

    Args:
        name: Name of the operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        is_model: Whether an object is a value of the model, not computed from the batch alone.
        numbers_read: Whether the step has read numbers from the batch, which may be among the arguments.
    """
    if name in _BY_CLASS | _BY_ELEMENT:
        bound = _bound(name, args, kwargs)
        if bound is None or not isinstance(bound["target"], Tensor):
            return ""
        if is_model(bound["target"]):
            return "sum" if bound["reduction"] == "sum" else ""
        how = {"mean": "classes" if name in _BY_CLASS else "elements", "sum": "sum"}
        return how.get(bound["reduction"], "")  # type: ignore[return-value]
    if name == "mean" and len(args) == 1 and not kwargs:
        return "rows"
    if name == "__rtruediv__" or (name in DIVISIONS and len(args) == 2 and is_model(args[1])):
        return "inverse"
    if name in PRODUCTS and len(args) == 2 and not kwargs:
        made = [arg for arg in args if not is_model(arg) and (isinstance(arg, Tensor) or numbers_read)]
        if made:
            return "divisor" if name in DIVISIONS else "product"
    return ""


def picked_rows(name: str, args: Any, kwargs: Any, is_model: Callable[[Any], bool]) -> Tensor | None:
    """The number of rows, a scalar, that an operation selects by a boolean mask of the batch; None for others."""
    if name not in _PICKS:
        return None
    masks = [leaf for leaf in flatten((args[1:], kwargs))[0] if isinstance(leaf, Tensor) and leaf.dtype is torch.bool]
    return masks[0].sum() if len(masks) == 1 and not is_model(masks[0]) else None


def count(how: Averages, name: str, args: Any, kwargs: Any, is_model: Callable[[Any], bool]) -> Tensor | float | None:
    """The denominator, a scalar, of a mean in one microbatch; for a product its other factor, of one element.

    ``how`` is the result of ``averages``, and the other arguments are as there.
    """
    if how in ("divisor", "product"):
        made = [arg for arg in args if not is_model(arg)]
        return made[0] if len(made) == 1 and _is_number(made[0]) else None
    bound = _bound(name, args, kwargs)
    if bound is None:
        return None
    target: Tensor = bound["target"]
    if how == "elements":
        return target.numel()
    if target.is_floating_point():  # probabilities of all classes
        return target.numel() // target.shape[-1 if target.dim() == 1 else 1]
    kept = target != bound["ignore_index"]
    weight = bound["weight"]
    return kept.sum() if weight is None else weight.detach()[target[kept]].double().sum()


def labels_of(name: str, args: Any, kwargs: Any) -> tuple[Tensor, int] | None:
    """The labels of an unweighted mean over class labels, of shape (N,) or (N, d1, ..., dk), and the ignored label.

    None for other means.
    """
    bound = _bound(name, args, kwargs) if name in _BY_CLASS else None
    if bound is None or bound["weight"] is not None or bound["target"].is_floating_point():
        return None
    return bound["target"], bound["ignore_index"]


def weighted_by_share(name: str, how: Averages, run: Callable[..., Any], share: Share) -> Callable[..., Any]:
    """Wrap an operation that averages, by ``how``, to weight its result by the share of a microbatch.

    With a count of 0 (0 / 0) it is an empty sum.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if how == "divisor":
            return args[0] / share.divisor
        if share.factor:
            return run(*args, **kwargs) * share.factor
        if how == "rows":
            return args[0].sum()
        bound = _bound(name, args, kwargs)
        assert bound is not None
        return getattr(F, name)(**{**bound, "reduction": "sum"})

    return call


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _bound(name: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a loss function by name; None if deprecated ones are used."""
    bound = _signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if arguments.pop("size_average", None) is not None or arguments.pop("reduce", None) is not None:
        return None
    return arguments


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(F, name))
