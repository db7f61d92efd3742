"""Grouped experts: MLPs of one shape with stacked weights, each on its own rows, as two custom operators of torch.

One operator computes the forward, one the backward; each loops over the experts and writes every matrix product into
its slice of one buffer (``out=``): nothing is concatenated, filled with zeros, or added up. The hidden features of an
expert are computed while they are in the cache, in scratch memory that all experts reuse. Only the rows and the result
of the first product are saved for the backward; the activation is recomputed.

They are operators with a fake kernel, and not a loop of Python: the number of rows of an expert exists only with real
data, while the shapes of all results do not depend on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_aten: Any = torch.ops.aten
_SAVED_CHUNK_BYTES = 16 << 20


class Activation(NamedTuple):
    """Elementwise activation in three versions: for autograd, into a buffer, and its gradient into a buffer."""

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
    """Applies the MLP of each expert to its rows, of shape [P, D] and sorted by expert, P = the sum of counts [E].

    Of shape [E, H, D], or gated [E, 2H, D], ``up`` has first the input of the activation, then its multiplier; ``down``
    is [E, O, H], and the biases are [E, H or 2H] and [E, O]. The results are of shape [P, O].

    Raises:
        ValueError: The counts do not sum to P.
    """
    keep = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (rows, up, up_bias, down, down_bias)
    )
    counts = counts.cpu()  # the one copy of a forward and its backward
    out: Tensor = _forward(rows, counts, up, up_bias, down, down_bias, activation, gated, keep)[0]
    return out


def _bounds(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields expert, start and stop of its rows, for each expert with rows."""
    start = 0
    for expert, count in enumerate(numbers):
        if count:
            yield expert, start, start + count
        start += count


def _numbers(counts: Tensor, num_rows: int) -> list[int]:
    """The counts, on the host, as numbers."""
    numbers: list[int] = counts.tolist()
    if sum(numbers) != num_rows:
        raise ValueError(f"counts of rows sum to {sum(numbers)}, but there are {num_rows} rows; pass one per row")
    return numbers


def _saved_buffers(rows: Tensor, up: Tensor) -> list[Tensor]:
    """Allocates buffers for the first product, [P, U] in chunks of rows.

    Not one tensor: large blocks come from the system each time, with a fault per page, which cost a tenth of a step.
    """
    num_rows, width = rows.shape[0], up.shape[1]
    each = (
        max(_SAVED_CHUNK_BYTES // (width * rows.element_size()), 1) if rows.device.type == "cpu" else max(num_rows, 1)
    )
    return [rows.new_empty(min(each, num_rows - first), width) for first in range(0, num_rows, each)]


def _saves_result(function: Activation, gated: bool) -> bool:
    """Returns whether the activation's result is saved in place of its input."""
    return function.from_result and not gated


def _pieces(saved: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yields the saved chunks of rows [start, stop): first row, row after the last, and their slice of a buffer."""
    each = saved[0].shape[0]
    for number in range(start // each, (stop - 1) // each + 1):
        begin = number * each
        first, last = max(start, begin), min(stop, begin + each)
        yield first, last, saved[number][first - begin : last - begin]


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
    numbers = _numbers(counts, rows.shape[0])
    largest = max(numbers, default=0)
    saved = _saved_buffers(rows, up) if keep else []
    spare = rows.new_empty(0 if keep else largest, up.shape[1])
    in_place = _saves_result(function, gated)
    scratch = rows.new_empty(0 if in_place else largest, width)
    ups, downs = up.unbind(0), down.unbind(0)
    for expert, start, stop in _bounds(numbers):
        for first, last, before in _pieces(saved, start, stop) if keep else [(start, stop, spare[: stop - start])]:
            torch.mm(rows[first:last], ups[expert].t(), out=before)
            if up_bias is not None:
                before += up_bias[expert]
            hidden = before if in_place else scratch[: last - first]
            function.into(before[:, :width], hidden)
            if gated:
                hidden *= before[:, width:]
            result = out[first:last]
            torch.mm(hidden, downs[expert].t(), out=result)
            if down_bias is not None:
                result += down_bias[expert]
    return out, saved


@_forward.register_fake
def _(rows: Tensor, counts: Tensor, up: Tensor, up_bias: Any, down: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor]]:
    *_, keep = rest
    return rows.new_empty(rows.shape[0], down.shape[1]), _saved_buffers(rows, up) if keep else []


@torch.library.custom_op("lightning_hybrid::grouped_mlp_backward", mutates_args=())
def _backward(
    grad: Tensor,
    rows: Tensor,
    counts: Tensor,
    saved: Sequence[Tensor],
    up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes gradients of rows, up, up_bias, down and down_bias; empty where not needed. The host has the counts."""
    needs_rows, needs_up, needs_up_bias, needs_down, needs_down_bias = needs
    function = ACTIVATIONS[activation]
    width = down.shape[2]
    grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias = results = _gradients(rows, up, down, needs)
    numbers: list[int] = counts.tolist()
    largest = max(numbers, default=0)
    inner = needs_rows or needs_up or needs_up_bias
    is_result = _saves_result(function, gated)
    after_scratch = rows.new_empty(largest, width)
    before_scratch = rows.new_empty(largest if inner or gated else 0, up.shape[1])
    ups, downs, grad_ups, grad_downs = up.unbind(0), down.unbind(0), grad_up.unbind(0), grad_down.unbind(0)
    for expert in [expert for expert, count in enumerate(numbers) if not count]:
        for gradient in itertools.compress(results[1:], needs[1:]):
            gradient[expert].zero_()
    for expert, start, stop in _bounds(numbers):
        count = stop - start
        above = grad[start:stop]
        if needs_down_bias:
            torch.sum(above, 0, out=grad_down_bias[expert])
        # `below` becomes the gradient of the first product; its second half first stores the activation.
        below, after = before_scratch[:count], after_scratch[:count]
        pieces = [(slice(first - start, last - start), piece) for first, last, piece in _pieces(saved, start, stop)]
        for chunk, before in pieces:
            if gated:
                function.into(before[:, :width], below[chunk, width:])
                torch.mul(below[chunk, width:], before[:, width:], out=after[chunk])
            elif needs_down and not is_result:
                function.into(before, after[chunk])
            elif needs_down and len(pieces) > 1:
                after[chunk] = before
        if needs_down:
            torch.mm(above.t(), pieces[0][1] if is_result and len(pieces) == 1 else after, out=grad_downs[expert])
        if not inner:
            continue
        torch.mm(above, downs[expert], out=after)
        if gated:
            below[:, width:] *= after
        for chunk, before in pieces:
            if gated:
                after[chunk] *= before[:, width:]
            function.gradient(after[chunk], before[:, :width], below[chunk, :width])
        if needs_up_bias:
            torch.sum(below, 0, out=grad_up_bias[expert])
        if needs_up:
            torch.mm(below.t(), rows[start:stop], out=grad_ups[expert])
        if needs_rows:
            torch.mm(below, ups[expert], out=grad_rows[start:stop])
    return results


def _gradients(rows: Tensor, up: Tensor, down: Tensor, needs: Sequence[bool]) -> _Gradients:
    """Allocates the gradients that are needed; empty tensors for the others."""
    shapes = (rows.shape, up.shape, up.shape[:2], down.shape, down.shape[:2])
    first, second, third, fourth, fifth = (
        rows.new_empty(tuple(shape) if needed else (0,) * len(shape))
        for shape, needed in zip(shapes, needs, strict=True)
    )
    return first, second, third, fourth, fifth


@_backward.register_fake
def _(grad: Tensor, rows: Tensor, counts: Tensor, saved: Any, up: Tensor, down: Tensor, *rest: Any) -> _Gradients:
    *_, needs = rest
    return _gradients(rows, up, down, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    rows, counts, up, up_bias, down, down_bias, ctx.activation, ctx.gated, _ = inputs
    ctx.mark_non_differentiable(*output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, counts, up, up_bias, down, down_bias, *output[1])


def _autograd_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    rows, counts, up, up_bias, down, down_bias, *saved = ctx.saved_tensors
    needs = [ctx.needs_input_grad[position] for position in (0, 2, 3, 4, 5)]
    results: Sequence[Tensor | None]
    if torch.is_grad_enabled():  # double backward
        inputs = [rows, up, up_bias, down, down_bias]
        trained = [tensor for tensor, needed in zip(inputs, needs, strict=True) if needed]
        out = _composed(rows, counts, up, up_bias, down, down_bias, ctx.activation, ctx.gated)
        grads = iter(torch.autograd.grad(out, trained, grad, create_graph=True, materialize_grads=True))
        results = [next(grads) if needed else None for needed in needs]
    else:
        computed = _backward(grad.contiguous(), rows, counts, saved, up, down, ctx.activation, ctx.gated, needs)
        results = [gradient if needed else None for gradient, needed in zip(computed, needs, strict=True)]
    grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias = results
    return grad_rows, None, grad_up, grad_up_bias, grad_down, grad_down_bias, None, None, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def _composed(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
) -> Tensor:
    """Computes ``grouped_mlp`` by native operations of torch, which autograd can differentiate twice."""
    function = ACTIVATIONS[activation].plain
    pieces = [rows.new_empty(0, down.shape[1])]
    for expert, start, stop in _bounds(_numbers(counts, rows.shape[0])):
        before = F.linear(rows[start:stop], up[expert], None if up_bias is None else up_bias[expert])
        if gated:
            first, second = before.chunk(2, dim=1)
            after = function(first) * second
        else:
            after = function(before)
        pieces.append(F.linear(after, down[expert], None if down_bias is None else down_bias[expert]))
    return torch.cat(pieces)


class GroupedExperts(nn.Module):
    """E MLPs, ``down(activation(up(x)))``; gated (SwiGLU: Shazeer 2020) ``down(activation(u) * v)`` with u, v = up(x).

    Attributes:
        up: [E, H, D]; gated [E, 2H, D]: first u, then v. Each expert's slice is a weight of ``nn.Linear``.
        down: [E, D, H].
        up_bias: [E, H or 2H], or None.
        down_bias: [E, D], or None.
        counts_on_host: Whether counts are best given on the host, where they are read.
    """

    counts_on_host = True

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        """Creates the experts.

        Args:
            num_experts: E.
            dim: D, features of rows and results.
            hidden_dim: H, features between the two products of an expert.
            gated: Multiply the activation by a second product.
            activation: "silu", "gelu", "gelu_tanh" or "relu".
            bias: Add a bias to both products.

        Raises:
            ValueError: A size is not positive, or the activation unknown.
        """
        super().__init__()
        sizes = {"num_experts": num_experts, "dim": dim, "hidden_dim": hidden_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}; it must be at least 1")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}; use one of {', '.join(map(repr, ACTIVATIONS))}")
        self.num_experts, self.dim, self.hidden_dim = num_experts, dim, hidden_dim
        self.gated, self.activation = gated, activation
        between = (2 if gated else 1) * hidden_dim
        self.up = nn.Parameter(torch.empty(num_experts, between, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, between)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes weights as ``nn.Linear`` does."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Applies each expert to its rows.

        Args:
            rows: Of shape [P, D], sorted by expert.
            counts: Integers of shape [E]: rows of each expert, P in all.

        Returns:
            The results, of shape [P, D], in the dtype of autocast if that is on.

        Raises:
            ValueError: The counts do not sum to P.
        """
        inputs: list[Any] = [rows, self.up, self.up_bias, self.down, self.down_bias]
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            inputs = [None if tensor is None else tensor.to(dtype) for tensor in inputs]
        rows, up, up_bias, down, down_bias = inputs
        return grouped_mlp(rows, counts, up, up_bias, down, down_bias, activation=self.activation, gated=self.gated)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(module)``."""
        return (
            f"num_experts={self.num_experts}, dim={self.dim}, hidden_dim={self.hidden_dim}, gated={self.gated},"
            f" activation={self.activation!r}, bias={self.up_bias is not None}"
        )
