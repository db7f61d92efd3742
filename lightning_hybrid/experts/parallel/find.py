"""Modules with experts are found in a recorded step; a proof shows that their experts can be sharded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.parallel.adapters import (
    Call,
    ExpertList,
    ExpertsAdapter,
    candidate_adapters,
    is_float,
    stacked_experts,
)
from lightning_hybrid.experts.parallel.proof import ExpertsProof
from lightning_hybrid.experts.parallel.width import WidthSharding, possible_widths
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.modules import copied, tied_parameters
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.layers import UnitKinds, without_deduplication
from lightning_hybrid.text import spanned


@dataclass(frozen=True)
class FoundExperts:
    """Result of the detection, the same on every rank."""

    # adapter of each module with sharded experts, by FQN
    adapters: Mapping[str, ExpertsAdapter] = field(default_factory=dict)
    # reason why the experts of another module are replicated on every rank, by FQN
    replicated: Mapping[str, str] = field(default_factory=dict)
    # sharding of experts over tensor ranks, by FQN of the module
    widths: Mapping[str, WidthSharding] = field(default_factory=dict)
    # reason why the experts of another module are not sharded over tensor ranks, by FQN
    unsharded_widths: Mapping[str, str] = field(default_factory=dict)


class ExpertCalls:
    """Records how modules are called while a step is recorded, and finds experts among them."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._inputs: dict[str, Tensor] = {}  # first tensor of the last call of each module, while the step is recorded
        self._rows: dict[str, int] = {}  # number of vectors in it, if it has dims
        self._same_inputs: dict[str, int] = {}  # modules that were called with one tensor have the same number

    @contextlib.contextmanager
    def watching(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Records the calls of all modules in ``units``, which the recording of a step inside runs as one operation."""
        recorded = partial(partial, self._recorded_call)
        with without_deduplication(units), replaced_forwards(modules_in(units), recorded, reason="calls of experts"):
            yield
        self._same_inputs = {fqn: id(tensor) for fqn, tensor in self._inputs.items()}
        self._inputs = {}

    def _recorded_call(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls[fqn] = copied(args, _without_data), copied(kwargs, _without_data)
        self._rows.pop(fqn, None), self._inputs.pop(fqn, None)
        for first in filter(is_float, flatten((args, kwargs))[0]):
            if first.dim():
                self._rows[fqn], self._inputs[fqn] = first.shape[:-1].numel(), first
                break
        return forward(*args, **kwargs)

    def find(
        self, root: nn.Module, size: int, tensor_size: int = 1, why_unsharded: Callable[[str], str] = lambda fqn: ""
    ) -> FoundExperts:
        """Finds the modules of a root with full parameters whose experts ``size`` ranks, or tensor ranks, can share.

        ``why_unsharded`` returns why a module (by FQN) cannot be sharded over tensor ranks; "" if it can.
        """
        adapters: dict[str, ExpertsAdapter] = {}
        replicated: dict[str, str] = {}
        widths: dict[str, WidthSharding] = {}
        reasons: dict[str, str] = {}
        chosen: dict[int, ExpertsAdapter | str] = {}  # by structure of the module, as the next
        chosen_widths: dict[tuple[int, str], WidthSharding | str] = {}
        kinds = UnitKinds()
        tied = tied_parameters(root)
        for fqn, call in self._calls.items():
            module = root.get_submodule(fqn)
            candidates = [c for c in candidate_adapters(module, call) if not self._have_one_input(fqn, c)]
            if not candidates:
                continue
            may_be_layers = all(self._have_all_rows(fqn, c) for c in candidates)
            if any(id(parameter) in tied for parameter in module.parameters()):
                replicated[fqn] = reasons[fqn] = "its parameters are tied to those of other modules"
                continue
            key = kinds.kind_of(fqn, module)
            if size > 1 and key not in chosen:
                chosen[key] = _choose_adapter(module, candidates, call, size)
            choice = chosen.get(key, "")
            if isinstance(choice, ExpertsAdapter):
                adapters[fqn] = choice
            elif choice and not may_be_layers:
                replicated[fqn] = choice
            if tensor_size > 1 and stacked_experts(module):
                reason = why_unsharded(fqn)
                if (key, reason) not in chosen_widths:
                    tried = [(choice, size)] if isinstance(choice, ExpertsAdapter) else [(c, 1) for c in candidates]
                    chosen_widths[key, reason] = reason or _pick_width(module, tried, call, tensor_size)
                width = chosen_widths[key, reason]
                if isinstance(width, WidthSharding):
                    widths[fqn] = width
                else:
                    reasons[fqn] = width
        return FoundExperts(adapters, replicated, widths, reasons)

    def _have_one_input(self, fqn: str, adapter: ExpertsAdapter) -> bool:
        """Returns whether the modules of a list all get one tensor, as heads and branches do."""
        if not isinstance(adapter, ExpertList):
            return False
        inputs = [self._same_inputs.get(f"{fqn}.{name}", -number) for number, name in enumerate(adapter.names)]
        return len(set(inputs)) == 1

    def _have_all_rows(self, fqn: str, adapter: ExpertsAdapter) -> bool:
        """Returns whether the modules of a list all get all tokens, as layers do.

        A recording of a step in which each token takes one expert gives all rows to each: it cannot know how many.
        """
        if not isinstance(adapter, ExpertList):
            return False
        rows = [self._rows.get(f"{fqn}.{name}") for name in adapter.names]
        tokens = self._rows.get(fqn)
        return None not in rows and len(set(rows)) == 1 and tokens in (None, rows[0])


def modules_in(units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns the modules with parameters inside of units, by FQN."""
    return {
        f"{fqn}.{name}" if name else fqn: module
        for fqn, unit in units.items()
        for name, module in unit.named_modules()
        if any(True for _ in module.parameters())
    }


def _without_data(tensor: Tensor) -> Tensor:
    """Returns a meta tensor of the same shape and dtype: inputs of units may be large."""
    with torch._C.DisableTorchFunction():
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _choose_adapter(module: nn.Module, candidates: list[ExpertsAdapter], call: Call, size: int) -> ExpertsAdapter | str:
    """Returns the first adapter whose proof succeeds, or the reason why there is none."""
    reason = ""
    for adapter in candidates:
        if adapter.num_experts % size:
            reason = reason or f"its {adapter.num_experts} experts are no multiple of {size}"
            continue
        if not (difference := ExpertsProof(module, adapter, call, size).why_not_equivalent()):
            return adapter
        reason = reason or f"not the same in the proof: {difference}"
    return reason


def _pick_width(
    module: nn.Module, tried: list[tuple[ExpertsAdapter, int]], call: Call, tensor_size: int
) -> WidthSharding | str:
    """Returns the first sharding of each expert whose proof succeeds, or the reason why there is none."""
    possible, reason = possible_widths(module, tensor_size)
    proofs = [ExpertsProof(module, adapter, call, size, tensor_size) for adapter, size in tried[:1] if possible]
    for width, proof in itertools.product(possible, proofs):
        if not (difference := proof.why_not_equivalent(width)):
            return width
        reason = reason or f"not the same in the proof: {difference}"
    return reason


def has_stacked_experts(root: nn.Module) -> bool:
    """Returns whether some module may have stacked weights of experts."""
    return any(map(stacked_experts, root.modules()))


def describe_experts(found: FoundExperts, size: int, tensor_size: int) -> str:
    """Describes which experts are sharded and which are not, one line per kind of module."""
    by_kind: dict[tuple[str, int], list[str]] = {}
    for fqn, adapter in found.adapters.items():
        by_kind.setdefault((adapter.what, adapter.num_experts), []).append(fqn)
    lines = [
        f"{spanned(fqns)}: {number} experts, {number // size} on each of {size} ranks ({what})"
        for (what, number), fqns in by_kind.items()
    ]
    lines += [f"{fqns}: experts are replicated on every rank, {reason}" for fqns, reason in by_reason(found.replicated)]
    widths = {
        fqn: f"{width.length // width.size} of the {width.length} features of each expert"
        for fqn, width in found.widths.items()
    }
    lines += [f"{fqns}: {share} on each of {tensor_size} tensor ranks" for fqns, share in by_reason(widths)]
    lines += [
        f"{fqns}: no expert is sharded over tensor ranks, {reason}"
        for fqns, reason in by_reason(found.unsharded_widths)
    ]
    return "\n".join(lines)


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Groups modules by reason, given by FQN; returns the listed FQNs and the reason of each group."""
    groups: dict[str, list[str]] = {}
    for fqn, reason in reasons.items():
        groups.setdefault(reason, []).append(fqn)
    return [(spanned(fqns), reason) for reason, fqns in groups.items()]
