"""Costs of experts while a step is recorded for the planner: each runs on as many rows as tokens are routed to it.

A recording has no values by which tokens choose experts: loops over experts would run on all rows for each of them, or
on real values, of which nothing is known to be saved for the backward. Here

- experts whose shapes do not depend on values run as they are, and get the FLOPs of their rows, since torch has no
  formula for some of their kernels;
- other stacked weights are replaced by one expert's matrices, on the rows of all of them;
- a block with a list of experts runs its own code on random values without its experts, which counts their rows; one
  expert then runs on all of these.

Nothing is proved here, and no expert needs storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_hybrid.experts.parallel.adapters import (
    BatchedPairs,
    BatchedRows,
    Call,
    ExpertList,
    ExpertsAdapter,
    bound_arguments,
    candidate_adapters,
    rows_and_counts,
)
from lightning_hybrid.experts.parallel.find import modules_in
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.predict.costs.layers import Routing
from lightning_hybrid.step.objects.modules import tied_parameters
from lightning_hybrid.step.objects.pytree import flatten, map_leaves, unflatten
from lightning_hybrid.step.recording.layers import UnitKinds
from lightning_hybrid.step.standins.counts import CostCounter, Totals, active_counter
from lightning_hybrid.step.standins.kernels import NO_FAKE_KERNEL, run_on_real_values
from lightning_hybrid.step.standins.tensors import make_absent

Forward = Callable[..., Any]


class ExpertCosts:
    """Runs experts with the costs of their rows while a step is recorded, and tells what was found."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        tied = tied_parameters(root)
        owners = root.named_modules()
        self._with_tied = {name for name, owner in owners for p in owner._parameters.values() if id(p) in tied}
        self._found: dict[str, Routing] = {}

    @contextlib.contextmanager
    def watching(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Run the experts inside of units so, while a recording inside runs each unit as one operation."""
        self._found.clear()
        with replaced_forwards(modules_in(units), partial(partial, self._run), reason="costs of experts"):
            yield

    def sets(self, units: Mapping[str, nn.Module]) -> dict[str, tuple[Routing, ...]]:
        """Return the experts of each unit, by its FQN; a recording runs one of several equal units alone."""
        found: dict[str, tuple[Routing, ...]] = {}
        kinds, first = UnitKinds(), dict[int, str]()
        for fqn, unit in units.items():
            own = tuple(each for name, each in self._found.items() if f"{name}.".startswith(f"{fqn}."))
            kind = kinds.kind_of(fqn, unit)
            if own:
                first.setdefault(kind, fqn)
            elif kind in first:
                own = tuple(each.in_unit(first[kind], fqn) for each in found[first[kind]])
            if own:
                found[fqn] = own
        return found

    def _run(self, fqn: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        counter = active_counter()
        if counter is None:
            return forward(*args, **kwargs)
        module, call = self._root.get_submodule(fqn), (args, kwargs)
        adapters = candidate_adapters(module, call)
        if not adapters or any(f"{name}.".startswith(f"{fqn}.") for name in self._with_tied):
            return forward(*args, **kwargs)
        if not any(isinstance(leaf, FakeTensor) for leaf in flatten(call)[0]):  # code around them reads numbers
            if isinstance(adapters[0], BatchedPairs | BatchedRows):
                self._add_stacked(fqn, module, adapters[0], call)
            return forward(*args, **kwargs)
        if isinstance(adapters[0], ExpertList):
            return self._run_list(fqn, module, adapters[0], forward, call, counter)
        return self._run_stacked(fqn, module, adapters[0], forward, call, counter)

    def _add_stacked(
        self, fqn: str, module: nn.Module, adapter: ExpertsAdapter, call: Call, flops: float = 0.0
    ) -> Routing:
        """Note the experts of a call; ``flops`` were counted while they ran, if the call does not tell the rows."""
        names = tuple(f"{fqn}.{name}" for name, _ in module.named_parameters())
        tokens, rows = _tokens_and_rows(module, adapter, call)
        matrices = _oriented(_stacked(module), None if tokens is None else tokens.shape[-1])
        if rows is None:
            rows = flops / (2.0 * sum(inner * columns for inner, columns in matrices) or 1.0)
        self._found[fqn] = found = Routing(fqn, adapter.num_experts, names, float(rows), matrices)
        return found

    def _run_stacked(
        self, fqn: str, module: nn.Module, adapter: ExpertsAdapter, forward: Forward, call: Call, counter: CostCounter
    ) -> Any:
        totals = counter.totals()
        is_static, out = _attempt(forward, call, counter)
        if not is_static:
            counter.reset_to(totals)
            try:
                out = _run_one_stacked_expert(module, adapter, call)
            except Exception:  # it is no MLP of one or two products
                counter.reset_to(totals)
                out = forward(*call[0], **call[1])
        found = self._add_stacked(fqn, module, adapter, call, counter.flops - totals.flops)
        factor = 3.0 if torch.is_grad_enabled() else 1.0
        moved, again = counter.moved_bytes - totals.moved_bytes, found.flops * counter.num_repeats
        counter.reset_to(totals.plus(Totals(found.flops, factor * found.flops, moved, again)))
        return out

    def _run_list(
        self, fqn: str, module: nn.Module, adapter: ExpertList, forward: Forward, call: Call, counter: CostCounter
    ) -> Any:
        totals = counter.totals()
        called: dict[str, int] = {}
        experts = {name: module.get_submodule(name) for name in adapter.names}
        with replaced_forwards(experts, partial(_counting_rows, called), reason="rows of experts"):
            is_static, out = _attempt(forward, call, counter)
        tokens = next((leaf for leaf in flatten(call)[0] if _is_rows(leaf)), None)
        if is_static:
            rows = _routed(called, adapter, tokens)
        else:
            counter.reset_to(totals)
            rows, out = _run_with_one_expert(module, adapter, forward, call, tokens)
            if not rows:
                counter.reset_to(totals)
                return forward(*call[0], **call[1])
        if rows:
            names = tuple(
                f"{fqn}.{name}.{each}" for name in adapter.names for each, _ in experts[name].named_parameters()
            )
            matrices = tuple((p.shape[1], p.shape[0]) for p in experts[adapter.names[0]].parameters() if p.dim() == 2)
            self._found[fqn] = Routing(fqn, adapter.num_experts, names, float(rows), matrices)
        return out


def _attempt(forward: Forward, call: Call, counter: CostCounter) -> tuple[bool, Any]:
    """Run on stand-ins; returns whether no shape depends on values, and the result if there is one."""
    with counter.shapes_apart():
        try:
            out = forward(*call[0], **call[1])
            return not counter.has_dynamic_shapes, out
        except NO_FAKE_KERNEL:
            return False, None


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1


# -- stacked weights ---------------------------------------------------------------------------------------------------


def _tokens_and_rows(module: nn.Module, adapter: ExpertsAdapter, call: Call) -> tuple[Tensor | None, float | None]:
    """The tokens or rows that a module is called with, of shape [..., D], and the number of rows that it computes."""
    arguments = bound_arguments(module, call)
    if isinstance(adapter, BatchedPairs):
        return arguments[adapter.names["hidden"]], arguments[adapter.names["which"]].numel()
    if isinstance(adapter, BatchedRows):
        rows = arguments[adapter.names["rows"]]
        return rows, rows.shape[0]
    return next((leaf for leaf in flatten(call)[0] if _is_rows(leaf)), None), None


def _oriented(weights: list[nn.Parameter], width: int | None) -> tuple[tuple[int, int], ...]:
    """Sizes (inner, columns) of stacked matrices, which are [E, columns, inner] or all [E, inner, columns]."""
    is_transposed = bool(weights) and weights[0].shape[2] != width and weights[0].shape[1] == width
    sizes = [(weight.shape[1], weight.shape[2]) for weight in weights]
    return tuple(size if is_transposed else size[::-1] for size in sizes)


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 3]


def _run_one_stacked_expert(module: nn.Module, adapter: ExpertsAdapter, call: Call) -> Tensor:
    """The result of an MLP with or without a gate, as its first expert computes it of the rows of all of them."""
    arguments = bound_arguments(module, call)
    weights = _stacked(module)

    def mlp(rows: Tensor) -> Tensor:
        """Of shape [R, D] -> [R, D']."""
        *first, (down, (inner, _)) = sorted(
            zip(weights, _oriented(weights, rows.shape[1]), strict=True), key=lambda found: found[1][0] != rows.shape[1]
        )
        outs = [rows @ _first_of(weight, sizes) for weight, sizes in first]
        up = torch.cat(outs, dim=-1) if len(outs) > 1 else outs[0]
        hidden = F.silu(up[:, :inner]) * up[:, inner:] if up.shape[1] == 2 * inner else F.silu(up)
        return hidden @ _first_of(down, (inner, _))

    if isinstance(adapter, BatchedRows):
        return mlp(arguments[adapter.names["rows"]])
    assert isinstance(adapter, BatchedPairs)
    hidden, which, gates = (arguments[adapter.names[role]] for role in ("hidden", "which", "weights"))
    tokens = hidden.reshape(-1, hidden.shape[-1])
    return _routed_through(mlp, tokens, which.reshape(-1), gates.reshape(-1)).view(*hidden.shape[:-1], -1)


def _first_of(weight: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The first of stacked matrices, [E, ...] -> [inner, columns]."""
    first = weight[0]
    return first if tuple(first.shape) == sizes else first.t()


def _routed_through(expert: Forward, tokens: Tensor, index: Tensor, gates: Tensor) -> Tensor:
    """Apply an expert to rows of tokens, [T, D] -> [T, D'], that indices and gates of shape [R] have chosen."""
    results = expert(tokens.index_select(0, index)) * gates[:, None]
    return results.new_zeros(tokens.shape[0], results.shape[-1]).index_add(0, index, results.to(results.dtype))


# -- lists -------------------------------------------------------------------------------------------------------------


def _counting_rows(called: dict[str, int], name: str, forward: Forward) -> Forward:
    def counted(*args: Any, **kwargs: Any) -> Any:
        rows = next((leaf for leaf in flatten((args, kwargs))[0] if _is_rows(leaf)), None)
        called[name] = called.get(name, 0) + (0 if rows is None else rows.shape[:-1].numel())
        return forward(*args, **kwargs)

    return counted


def _routed(called: Mapping[str, int], adapter: ExpertList, tokens: Tensor | None) -> int:
    """The rows of all experts; 0 if the modules get all tokens, as layers do, or numbers that differ by no value."""
    numbers = set(called.values())
    if len(called) < adapter.num_experts or len(numbers) != 1 or tokens is None:
        return 0
    return 0 if numbers == {tokens.shape[:-1].numel()} else sum(called.values())


def _run_with_one_expert(
    module: nn.Module, adapter: ExpertList, forward: Forward, call: Call, tokens: Tensor | None
) -> tuple[int, Any]:
    """The rows of all experts of a block, and its result, for which one expert computes all of them; 0 if none are."""
    experts = [module.get_submodule(name) for name in adapter.names]
    arguments = bound_arguments(module, call)
    if taken := rows_and_counts(arguments, adapter.num_experts):
        rows = arguments[taken["rows"]]
        return rows.shape[0], experts[0](rows)
    if tokens is None:
        return 0, None
    try:
        columns = experts[0](tokens.new_zeros(0, tokens.shape[-1])).shape[-1]
        inside = {id(inner) for expert in experts for inner in expert.modules()}
        others = [inner for inner in module.modules() if id(inner) not in inside]
        (called, out), (other, _) = (
            _run_without_experts(dict(zip(adapter.names, experts, strict=True)), columns, fill, forward, call, others)
            for fill in (1.0, -1.0)
        )
    except Exception:
        return 0, None
    number, count = sum(called.values()), tokens.shape[:-1].numel()
    depend = number != sum(other.values())  # the rows of some on the results of others
    if depend or not number or set(called.values()) == {count}:
        return 0, None
    index = make_absent(torch.empty(number, dtype=torch.long, device="meta"), device=tokens.device)
    gates = make_absent(tokens.new_empty(number), requires_grad=True)
    routed = _routed_through(experts[0], tokens.reshape(count, -1), index, gates)
    leaves, spec = flatten(out)
    for position, leaf in enumerate(leaves):
        if _is_rows(leaf) and leaf.numel() == routed.numel() and leaf.shape[-1] == columns:
            leaves[position] = routed.view(leaf.shape)
            return number, unflatten(leaves, spec)
    return 0, None


def _run_without_experts(
    experts: Mapping[str, nn.Module], columns: int, fill: float, forward: Forward, call: Call, others: list[nn.Module]
) -> tuple[dict[str, int], Any]:
    """The rows of each expert of a block on random values, and its result, if all results of experts are equal."""
    called: dict[str, int] = {}

    def result(rows: Tensor) -> Tensor:
        """Of shape [..., D] -> [..., D']."""
        return rows.new_full((*rows.shape[:-1], columns), fill)

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        """Run on copies of the arguments, which the block may write."""
        args, kwargs = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return forward(*args, **kwargs)

    with replaced_forwards(experts, lambda name, _: _counting_rows(called, name, result), reason="rows of experts"):
        return called, run_on_real_values(on_copies, *call, others)
