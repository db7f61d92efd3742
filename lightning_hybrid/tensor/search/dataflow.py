"""The dataflow between the linears of a unit, which shows the pairs that can be sharded together.

Each value is tracked to the linears that it comes from, without another linear between. A linear that reads such a
value can be row-parallel, the linears that the value comes from column-parallel. The first operations on a linear's
output (a split, a view as heads) show how its features are arranged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.objects.modules import tied_parameters
from lightning_hybrid.tensor.plan import LinearLike
from lightning_hybrid.tensor.region import tensors_in

Pair = tuple[tuple[str, ...], tuple[str, ...]]  # columns, and the rows that they feed

_RESHAPES = frozenset({"view", "reshape", "unflatten"})
_SPLITS = frozenset({"split", "chunk", "tensor_split", "narrow", "__getitem__", "unbind", "split_with_sizes"})


@dataclass
class Arrangement:
    """How the output features of a linear are arranged in pieces and heads."""

    bounds: set[int] = field(default_factory=set)  # offsets at which the code splits them
    heads: dict[int, int] = field(default_factory=dict)  # start of a piece -> the number of heads that it is viewed as
    joined: tuple[int, ...] = ()  # lengths of the pieces that the input of this linear was concatenated from, if it was

    def pieces(self, length: int) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """The lengths of the pieces of `length` features, and the number of heads of each."""
        bounds = sorted({0, length} | {bound for bound in self.bounds if bound < length})
        lengths = tuple(stop - start for start, stop in pairwise(bounds))
        return lengths, tuple(self.heads.get(start) for start in bounds[:-1])


@dataclass
class LinearDataflow:
    """The linears of one run, and how they feed each other."""

    linears: dict[str, LinearLike] = field(default_factory=dict)  # that ran, in the order of their first call
    sources: dict[str, set[str]] = field(default_factory=dict)  # for each, the linears that its inputs come from
    arrangements: dict[str, Arrangement] = field(default_factory=dict)  # for each, the arrangement of its features
    attentions: list[str] = field(default_factory=list)  # FQNs of the `nn.MultiheadAttention` modules that ran

    def candidates(self, assigned: Collection[str] = (), no_rows: Collection[str] = ()) -> list[Pair]:
        """Pairs columns with the rows that they feed, in the order of their run; each linear in one pair at most."""
        groups: list[tuple[set[str], list[str]]] = []
        used: set[str] = set(assigned)
        rows: set[str] = set(assigned)  # their outputs are full
        for row in self.linears:
            columns = {column for column in self.sources[row] if column not in rows}
            if not columns or row in columns or row in used or row in no_rows:
                continue
            joined = next((group for group in groups if group[0] & columns), None)
            if joined is None:
                groups.append((columns, [row]))
            elif (columns - joined[0]) & used:
                continue
            else:
                # It may read others as well, for example channel weights that were computed from sums over channels.
                joined[0].update(columns)
                joined[1].append(row)
            rows.add(row)
            used |= columns | {row}
        order = list(self.linears)
        return [(tuple(sorted(columns, key=order.index)), tuple(reading)) for columns, reading in groups]


def trace_linears(unit: nn.Module, run: Callable[[], Any]) -> LinearDataflow:
    """Runs a unit once and records which linears feed which."""
    dataflow = LinearDataflow()
    shared = tied_parameters(unit)  # they would need several shardings
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for fqn, module in unit.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                dataflow.attentions.append(fqn)
                hooks.callback(module.register_forward_hook(_clear_sources).remove)
            elif may_be_linear(module) and not any(id(p) in shared for p in module.parameters()):
                hooks.callback(module.register_forward_hook(partial(_record_linear, fqn, dataflow)).remove)
        with _DataflowMode(dataflow):
            run()
    return dataflow


def may_be_linear(module: nn.Module) -> bool:
    """Whether a module has the parameters of a linear or a convolution; a run shows what it computes."""
    weight = module._parameters.get("weight")
    if weight is None or set(module._parameters) - {"weight", "bias"} or next(module.children(), None) is not None:
        return False
    if isinstance(module, _ConvNd):
        return module.groups == 1 and _runs_torch_code(module)
    return weight.dim() == 2 and (_runs_torch_code(module) or _does_one_product(module))


def _runs_torch_code(module: nn.Module) -> bool:
    """Whether a module runs torch's own code."""
    return "forward" not in module.__dict__ and type(module).forward.__module__.startswith("torch.nn.")


# The names in code that multiplies by a weight and adds a bias, and does no more.
_PRODUCT_NAMES = frozenset(
    {
        "torch", "nn", "functional", "F", "linear", "matmul", "mm", "addmm", "baddbmm", "einsum", "add",
        "weight", "bias", "t", "T", "transpose", "mT", "size", "shape", "view", "reshape", "to", "dtype", "type_as",
    }
)  # fmt: skip


def _does_one_product(module: nn.Module) -> bool:
    """Whether the user's forward can do nothing but a product with its weight, now and later.

    One run is no proof: the result may depend on a flag, a mask or values, and the sharded forward replaces this code.
    """
    code = getattr(type(module).forward, "__code__", None)
    if code is None or "forward" in module.__dict__ or any(True for _ in module.buffers()):
        return False
    sizes = set(module._parameters["weight"].shape)  # type: ignore[union-attr]
    size_attributes = {name for name, value in module.__dict__.items() if type(value) is int and value in sizes}
    return not set(code.co_names) - _PRODUCT_NAMES - size_attributes


def _clear_sources(module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tensors_in([output]):
        tensor.__dict__.pop("_sources", None)


def _record_linear(fqn: str, dataflow: LinearDataflow, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """A forward hook that records the sources of the input, and marks the output as the linear's."""
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return
    linear = dataflow.linears.get(fqn) or _as_linear(fqn, module, args[0], output)
    if linear is None:
        return
    dataflow.linears.setdefault(fqn, linear)
    dataflow.sources.setdefault(fqn, set()).update(getattr(args[0], "_sources", ()))
    arrangement = dataflow.arrangements.setdefault(fqn, Arrangement())
    arrangement.joined = getattr(args[0], "_joined", arrangement.joined)
    output._sources = frozenset({fqn})  # type: ignore[attr-defined]
    output._features = (fqn, 0, linear.num_out)  # type: ignore[attr-defined]


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
            is_that = torch.allclose(expected, output) if not output.is_meta else out_dim == _out_dim_in_code(module)
            if is_that or (output.is_meta and len(matrix) != matrix.shape[1]):
                return LinearLike(fqn, out_dim, 1 - out_dim, -1, False, len(matrix), matrix.shape[1], bias is not None)
    return None


def _out_dim_in_code(module: nn.Module) -> int:
    """The dim of a square weight that holds the outputs, by the names in the user's code: no transpose, the last."""
    if _runs_torch_code(module):
        return 0
    names = set(type(module).forward.__code__.co_names)
    return 0 if names & {"linear", "t", "T", "mT", "transpose", "einsum"} else 1


class _DataflowMode(TorchFunctionMode):
    """A function mode that propagates the sources of values, and records how the output of a linear is split."""

    def __init__(self, dataflow: LinearDataflow) -> None:
        super().__init__()
        self._dataflow = dataflow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        sources = frozenset().union(*(getattr(tensor, "_sources", ()) for tensor in tensors))
        results = list(tensors_in([out]))
        if sources:
            for result in results:
                result._sources = sources  # type: ignore[attr-defined]
            self._record_arrangement(getattr(func, "__name__", ""), tensors, results)
        return out

    def _record_arrangement(self, name: str, tensors: list[Tensor], results: list[Tensor]) -> None:
        if name in ("cat", "concat", "concatenate") and len(results) == 1:
            lengths = tuple(tensor.shape[-1] for tensor in tensors)
            if sum(lengths) == results[0].shape[-1]:
                results[0]._joined = lengths  # type: ignore[attr-defined]
            return
        slices = [tensor for tensor in tensors if hasattr(tensor, "_features")]
        if len(slices) != 1 or not results:
            return
        tensor, (fqn, start, length) = slices[0], slices[0]._features
        arrangement = self._dataflow.arrangements[fqn]
        dim = self._dataflow.linears[fqn].feature_dim
        if name in _SPLITS and all(result.dim() == tensor.dim() for result in results):
            self._record_split(tensor, results, arrangement, fqn, start, dim)
        elif name in _RESHAPES and len(results) == 1 and dim == -1:
            _record_view(tensor, results[0], arrangement, start, length)
        elif len(results) == 1 and results[0].shape == tensor.shape and results[0] is not tensor:
            results[0]._features = (fqn, start, length)  # type: ignore[attr-defined]

    def _record_split(
        self, tensor: Tensor, results: list[Tensor], arrangement: Arrangement, fqn: str, start: int, dim: int
    ) -> None:
        for result in results:
            length = result.shape[dim]
            if length == tensor.shape[dim]:
                continue
            # The storage offset gives the slice: splits and slices are views of one tensor.
            offset = (result.storage_offset() - tensor.storage_offset()) // max(tensor.stride(dim), 1)
            if result.stride(dim) != tensor.stride(dim) or not 0 <= offset <= tensor.shape[dim] - length:
                continue
            arrangement.bounds |= {start + offset, start + offset + length}
            result._features = (fqn, start + offset, length)  # type: ignore[attr-defined]


def _record_view(tensor: Tensor, result: Tensor, arrangement: Arrangement, start: int, length: int) -> None:
    """Records features viewed as (heads, features per head), or as (2 or 3 pieces, heads, features per head)."""
    extra = _trailing_sizes(result.shape, length)
    if len(extra) < 2:
        return
    if len(extra) >= 3 and extra[0] in (2, 3):
        step = length // extra[0]
        for piece in range(extra[0]):
            arrangement.bounds.add(start + piece * step)
            arrangement.heads[start + piece * step] = extra[1]
    else:
        arrangement.heads[start] = extra[0]


def _trailing_sizes(shape: torch.Size, length: int) -> list[int]:
    """The trailing sizes whose product is ``length``; empty if there are none."""
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
