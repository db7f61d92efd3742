"""The dataflow between the linears of a unit, which tells the pairs that can be sharded together.

Each value is tracked to the linears that it comes from, without another linear between. A linear that reads such a
value can be cut by its input features, the linears that the value comes from by their output features. What the code
does to a linear's output right away (splitting it, viewing it as heads) says how its features are arranged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

from lightning_hybrid.tensor.plan.unit_plan import LinearLike
from lightning_hybrid.tensor.runtime.region_mode import tensors_in

Pair = tuple[tuple[str, ...], tuple[str, ...]]  # columns, and the rows that they feed

_RESHAPES = frozenset({"view", "reshape", "unflatten"})
_SPLITS = frozenset({"split", "chunk", "tensor_split", "narrow", "__getitem__", "unbind", "split_with_sizes"})


@dataclass
class Arrangement:
    """How the output features of a linear are used.

    Attributes:
        bounds: Offsets at which the code cuts them.
        heads: Start of a piece -> how many heads it is viewed as.
        joined: Lengths of the pieces that an input of this linear was joined from, if it was.
    """

    bounds: set[int] = field(default_factory=set)
    heads: dict[int, int] = field(default_factory=dict)
    joined: tuple[int, ...] = ()

    def pieces(self, length: int) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """Lengths of the pieces, and the heads of each."""
        bounds = sorted({0, length} | {bound for bound in self.bounds if bound < length})
        lengths = tuple(stop - start for start, stop in pairwise(bounds))
        return lengths, tuple(self.heads.get(start) for start in bounds[:-1])


@dataclass
class Discovery:
    """What one run showed.

    Attributes:
        linears: All linears that ran, in the order of their first call.
        sources: For each, the linears that its inputs come from.
        arrangements: For each, how its features are used.
        attentions: FQNs of the `nn.MultiheadAttention` modules that ran.
    """

    linears: dict[str, LinearLike] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    arrangements: dict[str, Arrangement] = field(default_factory=dict)
    attentions: list[str] = field(default_factory=list)

    def candidates(self, taken: Collection[str] = (), no_rows: Collection[str] = ()) -> list[Pair]:
        """Columns and the rows they feed, in the order of their run; each linear in one candidate at most.

        Args:
            taken: Linears whose role is fixed.
            no_rows: Those that are known to be no rows; they may be columns.
        """
        groups: list[tuple[set[str], list[str]]] = []
        used: set[str] = set(taken)
        rows: set[str] = set(taken)  # what these give is whole
        for row in self.linears:
            columns = {column for column in self.sources[row] if column not in rows}
            if not columns or row in columns or row in used or row in no_rows:
                continue
            joined = next((group for group in groups if group[0] & columns), None)
            if joined is not None:
                # It may read others as well: weights of channels that were made from sums over them, say.
                if not (columns - joined[0]) & used:
                    joined[0].update(columns)
                    joined[1].append(row)
                    rows.add(row)
                    used |= columns | {row}
                continue
            groups.append((columns, [row]))
            rows.add(row)
            used |= columns | {row}
        order = list(self.linears)
        return [(tuple(sorted(columns, key=order.index)), tuple(found)) for columns, found in groups]


def discover(unit: nn.Module, run: Callable[[], Any]) -> Discovery:
    """Run a unit once and see which linears feed which.

    Args:
        unit: A copy of the unit; its weights are random, so that a linear can be told from its numbers.
        run: Calls it on small inputs.
    """
    found = Discovery()
    shared = _tied_parameters(unit)
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for fqn, module in unit.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                found.attentions.append(fqn)
                hooks.callback(module.register_forward_hook(_clear_sources).remove)
            elif may_be_linear(module) and not any(id(p) in shared for p in module.parameters()):
                hooks.callback(module.register_forward_hook(_LinearHook(fqn, found)).remove)
        with _DataflowMode(found):
            run()
    return found


def _tied_parameters(unit: nn.Module) -> set[int]:
    """Ids of parameters that several modules hold; they would have to be cut in several ways."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in unit.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def may_be_linear(module: nn.Module) -> bool:
    """Whether a module holds one weight as a linear or a convolution does; what it computes is seen when it runs."""
    weight = module._parameters.get("weight")
    if weight is None or set(module._parameters) - {"weight", "bias"} or next(module.children(), None) is not None:
        return False
    if isinstance(module, _ConvNd):
        return module.groups == 1 and _runs_torch_code(module)
    return weight.dim() == 2 and (_runs_torch_code(module) or _does_one_product(module))


def _runs_torch_code(module: nn.Module) -> bool:
    """Whether a module runs torch's own code."""
    return "forward" not in module.__dict__ and type(module).forward.__module__.startswith("torch.nn.")


# What code names that multiplies by a weight and adds a bias, and no more.
_PRODUCT_NAMES = frozenset(
    {
        "torch", "nn", "functional", "F", "linear", "matmul", "mm", "addmm", "baddbmm", "einsum", "add",
        "weight", "bias", "t", "T", "transpose", "mT", "size", "shape", "view", "reshape", "to", "dtype", "type_as",
    }
)  # fmt: skip


def _does_one_product(module: nn.Module) -> bool:
    """Whether a module's own code can do nothing but a product with its weight, now and later.

    What it computed once may hang by a flag, a mask or the size of numbers, and its code is not run any more.
    """
    code = getattr(type(module).forward, "__code__", None)
    if code is None or "forward" in module.__dict__ or any(True for _ in module.buffers()):
        return False
    sizes = set(module._parameters["weight"].shape)  # type: ignore[union-attr]
    plain = {name for name, value in module.__dict__.items() if type(value) is int and value in sizes}
    return not set(code.co_names) - _PRODUCT_NAMES - plain


def _clear_sources(module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tensors_in([output]):
        tensor.__dict__.pop("_from", None)


class _LinearHook:
    """A forward hook: notes where the input comes from, and that the output comes from here."""

    def __init__(self, fqn: str, found: Discovery) -> None:
        self._fqn, self._found = fqn, found

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        linear = self._found.linears.get(self._fqn) or _as_linear(self._fqn, module, args[0], output)
        if linear is None:
            return
        found = self._found
        found.linears.setdefault(self._fqn, linear)
        found.sources.setdefault(self._fqn, set()).update(getattr(args[0], "_from", ()))
        arrangement = found.arrangements.setdefault(self._fqn, Arrangement())
        arrangement.joined = getattr(args[0], "_joined", arrangement.joined)
        output._from = frozenset({self._fqn})  # type: ignore[attr-defined]
        output._part = (self._fqn, 0, linear.num_out)  # type: ignore[attr-defined]


def _as_linear(fqn: str, module: nn.Module, x: Tensor, output: Tensor) -> LinearLike | None:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    if isinstance(module, _ConvNd):
        out_dim = 1 if isinstance(module, _ConvTransposeNd) else 0
        spatial = weight.dim() - 2
        return LinearLike(
            fqn, out_dim, 1 - out_dim, -1 - spatial, True, module.out_channels, module.in_channels, bias is not None
        )
    for out_dim, matrix in ((0, weight), (1, weight.t())):
        if x.is_floating_point() and x.shape[-1] == matrix.shape[1] and output.shape == (*x.shape[:-1], len(matrix)):
            expected = torch.nn.functional.linear(x, matrix, bias)
            if torch.allclose(expected, output):
                return LinearLike(fqn, out_dim, 1 - out_dim, -1, False, len(matrix), matrix.shape[1], bias is not None)
    return None


class _DataflowMode(TorchFunctionMode):
    """Hands down where values come from, and notes how the features of a linear's output are taken apart."""

    def __init__(self, found: Discovery) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        sources = frozenset().union(*(getattr(tensor, "_from", ()) for tensor in tensors))
        results = list(tensors_in([out]))
        if sources:
            for result in results:
                result._from = sources  # type: ignore[attr-defined]
            self._arrange(getattr(func, "__name__", ""), tensors, results)
        return out

    def _arrange(self, name: str, tensors: list[Tensor], results: list[Tensor]) -> None:
        if name in ("cat", "concat", "concatenate") and len(results) == 1:
            lengths = tuple(tensor.shape[-1] for tensor in tensors)
            if sum(lengths) == results[0].shape[-1]:
                results[0]._joined = lengths  # type: ignore[attr-defined]
            return
        parts = [tensor for tensor in tensors if hasattr(tensor, "_part")]
        if len(parts) != 1 or not results:
            return
        tensor, (fqn, start, length) = parts[0], parts[0]._part
        arrangement = self._found.arrangements[fqn]
        dim = self._found.linears[fqn].feature_dim
        if name in _SPLITS and all(result.dim() == tensor.dim() for result in results):
            self._split(tensor, results, arrangement, fqn, start, dim)
        elif name in _RESHAPES and len(results) == 1 and dim == -1:
            _view(tensor, results[0], arrangement, start, length)
        elif len(results) == 1 and results[0].shape == tensor.shape and results[0] is not tensor:
            results[0]._part = (fqn, start, length)  # type: ignore[attr-defined]

    def _split(
        self, tensor: Tensor, results: list[Tensor], arrangement: Arrangement, fqn: str, start: int, dim: int
    ) -> None:
        for result in results:
            length = result.shape[dim]
            if length == tensor.shape[dim]:
                continue
            # Where the part lies is read off its memory: splits and slices are views of one tensor.
            offset = (result.storage_offset() - tensor.storage_offset()) // max(tensor.stride(dim), 1)
            if result.stride(dim) != tensor.stride(dim) or not 0 <= offset <= tensor.shape[dim] - length:
                continue
            arrangement.bounds |= {start + offset, start + offset + length}
            result._part = (fqn, start + offset, length)  # type: ignore[attr-defined]


def _view(tensor: Tensor, result: Tensor, arrangement: Arrangement, start: int, length: int) -> None:
    """Features seen as (heads, features per head), or as (2 or 3 pieces, heads, features per head)."""
    extra = _trailing(result.shape, length)
    if len(extra) < 2:
        return
    if len(extra) >= 3 and extra[0] in (2, 3):
        step = length // extra[0]
        for piece in range(extra[0]):
            arrangement.bounds.add(start + piece * step)
            arrangement.heads[start + piece * step] = extra[1]
    else:
        arrangement.heads[start] = extra[0]


def _trailing(shape: torch.Size, length: int) -> list[int]:
    """The last sizes whose product is ``length``; empty if there are none."""
    found: list[int] = []
    product = 1
    for size in reversed(shape):
        if product == length and found and size != 1:
            break
        found.insert(0, size)
        product *= size
        if product > length:
            return []
    return found if product == length else []
