"""The arithmetic of many small MLPs of which each sees its own rows, as two operations of torch.

One operation computes forward, one backward; each walks over the experts and writes every product of matrices into its
place in one buffer (``out=``): nothing is concatenated, filled with zeros, or added up. What lies between the two
products of an expert is computed while it is in the cache, in scratch memory that all experts use in turn. For the
backward only the rows and what the first product gave are kept; the activation is computed again.

They are operations with a kernel for stand-ins, and not a loop of Python: how many rows an expert has is a number that
only exists when there are contents, while the shapes of all results are known without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten: Any = torch.ops.aten
_KEPT_BYTES = 16 << 20


class Activation(NamedTuple):
    """An elementwise function three times: for autograd, into a buffer, and its gradient into a buffer."""

    plain: Callable[[Tensor], Tensor]
    into: Callable[[Tensor, Tensor], object]  # (x, out)
    gradient: Callable[[Tensor, Tensor, Tensor], object]  # (gradient of the result, x, out)
    from_result: bool = False  # `gradient` gives the same for the result in place of x


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(
        F.silu,
        lambda x, out: _aten.silu.out(x, out=out),
        lambda grad, x, out: _aten.silu_backward.grad_input(grad, x, grad_input=out),
    ),
    "gelu": Activation(
        F.gelu,
        lambda x, out: _aten.gelu.out(x, out=out),
        lambda grad, x, out: _aten.gelu_backward.grad_input(grad, x, grad_input=out),
    ),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x, out: _aten.gelu.out(x, approximate="tanh", out=out),
        lambda grad, x, out: _aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out),
    ),
    "relu": Activation(
        F.relu,
        lambda x, out: torch.clamp_min(x, 0, out=out),
        lambda grad, x, out: _aten.threshold_backward.grad_input(grad, x, 0, grad_input=out),
        from_result=True,
    ),
}


def grouped_mlp(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str,
    gated: bool,
) -> Tensor:
    """Each expert's MLP on its own rows.

    Args:
        rows: [P, D], sorted by expert.
        counts: [E] whole numbers: rows of each expert, P in all.
        up: [E, H, D], or [E, 2H, D] if gated: first what goes through the activation, then what it is multiplied with.
        up_bias: [E, H or 2H].
        down: [E, O, H].
        down_bias: [E, O].
        activation: A key of ``ACTIVATIONS``.
        gated: Whether the activation is multiplied with a second product.

    Returns:
        [P, O].

    Raises:
        ValueError: The counts do not sum to P.
    """
    keep = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (rows, up, up_bias, down, down_bias)
    )
    out: Tensor = _forward(rows, counts, up, up_bias, down, down_bias, activation, gated, keep)[0]
    return out


def _bounds(counts: Tensor, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Expert, first row and row after the last, of those with rows."""
    numbers: Sequence[int] = counts.tolist()
    if sum(numbers) != num_rows:
        raise ValueError(f"counts of rows sum to {sum(numbers)}, but there are {num_rows} rows; pass one per row")
    start = 0
    for expert, count in enumerate(numbers):
        if count:
            yield expert, start, start + count
        start += count


def _largest(counts: Tensor) -> int:
    return int(counts.max()) if counts.numel() else 0


def _kept(rows: Tensor, up: Tensor) -> list[Tensor]:
    """Room for what the first product gives: [P, U], a tensor for so many rows.

    Not one tensor: what is large comes from the system each time, and a fault per page, which cost a tenth of a step.
    """
    num_rows, width = rows.shape[0], up.shape[1]
    each = max(_KEPT_BYTES // (width * rows.element_size()), 1) if rows.device.type == "cpu" else max(num_rows, 1)
    return [rows.new_empty(min(each, num_rows - first), width) for first in range(0, num_rows, each)]


def _keeps_result(function: Activation, gated: bool) -> bool:
    """Whether the activation's result is kept, in place of what it was given."""
    return function.from_result and not gated


def _pieces(kept: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """Where the rows of one expert are kept: first row, row after the last, and their part of a tensor."""
    each = kept[0].shape[0]
    for number in range(start // each, (stop - 1) // each + 1):
        begin = number * each
        first, last = max(start, begin), min(stop, begin + each)
        yield first, last, kept[number][first - begin : last - begin]


@torch.library.custom_op("lightning_hybrid::grouped_mlp", mutates_args=())
def _forward(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    keep: bool,
) -> tuple[Tensor, list[Tensor]]:
    function = ACTIVATIONS[activation]
    width = down.shape[2]
    out = rows.new_empty(rows.shape[0], down.shape[1])
    largest = _largest(counts)
    kept = _kept(rows, up) if keep else []
    spare = rows.new_empty(0 if keep else largest, up.shape[1])
    in_place = _keeps_result(function, gated)
    scratch = rows.new_empty(0 if in_place else largest, width)
    ups, downs = up.unbind(0), down.unbind(0)
    for expert, start, stop in _bounds(counts, rows.shape[0]):
        for first, last, before in _pieces(kept, start, stop) if keep else [(start, stop, spare[: stop - start])]:
            torch.mm(rows[first:last], ups[expert].t(), out=before)
            if up_bias is not None:
                before += up_bias[expert]
            part = before if in_place else scratch[: last - first]
            function.into(before[:, :width], part)
            if gated:
                part *= before[:, width:]
            result = out[first:last]
            torch.mm(part, downs[expert].t(), out=result)
            if down_bias is not None:
                result += down_bias[expert]
    return out, kept


@_forward.register_fake
def _(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    keep: bool,
) -> tuple[Tensor, list[Tensor]]:
    return rows.new_empty(rows.shape[0], down.shape[1]), _kept(rows, up) if keep else []


@torch.library.custom_op("lightning_hybrid::grouped_mlp_backward", mutates_args=())
def _backward(
    grad: Tensor,
    rows: Tensor,
    counts: Tensor,
    kept: Sequence[Tensor],
    up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, up, up_bias, down and down_bias; empty where not needed."""
    needs_rows, needs_up, needs_up_bias, needs_down, needs_down_bias = needs
    function = ACTIVATIONS[activation]
    width = down.shape[2]
    grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias = results = _gradients(rows, up, down, needs)
    largest = _largest(counts)
    inner = needs_rows or needs_up or needs_up_bias
    is_result = _keeps_result(function, gated)
    after_scratch = rows.new_empty(largest, width)
    before_scratch = rows.new_empty(largest if inner or gated else 0, up.shape[1])
    ups, downs, grad_ups, grad_downs = up.unbind(0), down.unbind(0), grad_up.unbind(0), grad_down.unbind(0)
    for expert in (counts == 0).nonzero().flatten().tolist():
        for gradient, needed in zip(results[1:], needs[1:], strict=True):
            if needed:
                gradient[expert].zero_()
    for expert, start, stop in _bounds(counts, rows.shape[0]):
        count = stop - start
        above = grad[start:stop]
        if needs_down_bias:
            torch.sum(above, 0, out=grad_down_bias[expert])
        # `below` becomes the gradient of what the first product gave; its second part first holds the activation.
        below, after = before_scratch[:count], after_scratch[:count]
        pieces = [(slice(first - start, last - start), piece) for first, last, piece in _pieces(kept, start, stop)]
        for part, before in pieces:
            if gated:
                function.into(before[:, :width], below[part, width:])
                torch.mul(below[part, width:], before[:, width:], out=after[part])
            elif needs_down and not is_result:
                function.into(before, after[part])
            elif needs_down and len(pieces) > 1:
                after[part] = before
        if needs_down:
            torch.mm(above.t(), pieces[0][1] if is_result and len(pieces) == 1 else after, out=grad_downs[expert])
        if not inner:
            continue
        torch.mm(above, downs[expert], out=after)
        if gated:
            below[:, width:] *= after
        for part, before in pieces:
            if gated:
                after[part] *= before[:, width:]
            function.gradient(after[part], before[:, :width], below[part, :width])
        if needs_up_bias:
            torch.sum(below, 0, out=grad_up_bias[expert])
        if needs_up:
            torch.mm(below.t(), rows[start:stop], out=grad_ups[expert])
        if needs_rows:
            torch.mm(below, ups[expert], out=grad_rows[start:stop])
    return results


def _gradients(
    rows: Tensor, up: Tensor, down: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for those that are needed."""
    shapes = (rows.shape, up.shape, up.shape[:2], down.shape, down.shape[:2])
    first, *others = (
        rows.new_empty(tuple(shape) if needed else (0,) * len(shape))
        for shape, needed in zip(shapes, needs, strict=True)
    )
    second, third, fourth, fifth = others
    return first, second, third, fourth, fifth


@_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor,
    counts: Tensor,
    kept: Sequence[Tensor],
    up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(rows, up, down, needs)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    rows, counts, up, up_bias, down, down_bias, ctx.activation, ctx.gated, _ = inputs
    ctx.mark_non_differentiable(*output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, counts, up, up_bias, down, down_bias, *output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    rows, counts, up, up_bias, down, down_bias, *kept = ctx.saved_tensors
    needs = [ctx.needs_input_grad[place] for place in (0, 2, 3, 4, 5)]
    found: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # the gradient is to be differentiated again
        given = [rows, up, up_bias, down, down_bias]
        wanted = [tensor for tensor, needed in zip(given, needs, strict=True) if needed]
        out = one_by_one(rows, counts, up, up_bias, down, down_bias, activation=ctx.activation, gated=ctx.gated)
        parts = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, materialize_grads=True))
        found = [next(parts) if needed else None for needed in needs]
    else:
        grads = _backward(grad.contiguous(), rows, counts, kept, up, down, ctx.activation, ctx.gated, needs)
        found = [part if needed else None for part, needed in zip(grads, needs, strict=True)]
    grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias = found
    return grad_rows, None, grad_up, grad_up_bias, grad_down, grad_down_bias, None, None, None


_forward.register_autograd(_differentiate, setup_context=_set_up)


def one_by_one(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str,
    gated: bool,
) -> Tensor:
    """The same as ``grouped_mlp``, of operations that autograd knows: for derivatives of derivatives."""
    function = ACTIVATIONS[activation].plain
    pieces = [rows.new_empty(0, down.shape[1])]
    for expert, start, stop in _bounds(counts, rows.shape[0]):
        before = F.linear(rows[start:stop], up[expert], None if up_bias is None else up_bias[expert])
        if gated:
            first, second = before.chunk(2, dim=1)
            after = function(first) * second
        else:
            after = function(before)
        pieces.append(F.linear(after, down[expert], None if down_bias is None else down_bias[expert]))
    return torch.cat(pieces)
