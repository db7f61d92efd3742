"""Find the modules with experts, as a recorded step shows them, and prove that ranks may share their experts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.parallel.adapter_registry import recognised
from lightning_hybrid.experts.parallel.equivalence_proof import prove
from lightning_hybrid.experts.parallel.expert_adapters import Call, ExpertsAdapter, stacked_experts
from lightning_hybrid.experts.parallel.expert_tensor_parallel import Width, possible_widths
from lightning_hybrid.experts.parallel.module_list_experts import ExpertList
from lightning_hybrid.randomness.keyed_draws import replaced_forwards
from lightning_hybrid.step.objects.deep_copy import copied
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.unit_dedup import UnitKinds, each_alone


@dataclass(frozen=True)
class FoundExperts:
    """What was found, the same on every rank.

    Attributes:
        adapters: By FQN of the module.
        whole: Why the experts of others stay whole on every rank, by FQN.
        widths: How experts are cut over tensor ranks, by FQN of the module.
        uncut: Why those of others are not, by FQN.
    """

    adapters: Mapping[str, ExpertsAdapter] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, Width] = field(default_factory=dict)
    uncut: Mapping[str, str] = field(default_factory=dict)


class ExpertCalls:
    """How modules are called while a step is recorded."""

    def __init__(self) -> None:
        """Before the recording."""
        self._calls: dict[str, Call] = {}
        self._rows: dict[str, int | None] = {}  # of each module, in its last call: numbers of vectors that it got

    @contextlib.contextmanager
    def watching(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """A step is recorded inside.

        Args:
            units: What the recording runs as one operation, by FQN; what lies in them is watched.
        """
        inside = {
            f"{fqn}.{name}" if name else fqn: module
            for fqn, unit in units.items()
            for name, module in unit.named_modules()
            if any(True for _ in module.parameters())
        }

        def wrap(fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def seen(*args: Any, **kwargs: Any) -> Any:
                tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
                first = next((t for t in tensors if t.is_floating_point() and t.dim()), None)
                self._calls[fqn] = copied(args, _form), copied(kwargs, _form)
                self._rows[fqn] = None if first is None else first.shape[:-1].numel()
                return forward(*args, **kwargs)

            return seen

        with each_alone(units), replaced_forwards(inside, wrap):
            yield

    def find(
        self, root: nn.Module, size: int, tensor_size: int = 1, uncut: Callable[[str], str] = lambda fqn: ""
    ) -> FoundExperts:
        """The modules whose experts ``size`` ranks can share, or tensor ranks.

        Args:
            root: The user's module, whole.
            size: Number of ranks that share experts.
            tensor_size: Number of tensor ranks.
            uncut: Why tensor ranks cannot share those of a module, given its FQN; nothing if they might.
        """
        found: dict[str, ExpertsAdapter] = {}
        whole: dict[str, str] = {}
        widths: dict[str, Width] = {}
        not_cut: dict[str, str] = {}
        known: dict[int, ExpertsAdapter | str] = {}
        known_widths: dict[tuple[int, str], Width | str] = {}
        kinds = UnitKinds()
        shared = _held_twice(root)
        for fqn, call in self._calls.items():
            module = root.get_submodule(fqn)
            candidates = [c for c in recognised(module, call) if not self._is_a_stack(fqn, c)]
            if not candidates:
                continue
            if any(id(parameter) in shared for parameter in module.parameters()):
                whole[fqn] = not_cut[fqn] = "other modules hold its parameters too"
                continue
            key = kinds.kind_of(fqn, module)
            if size > 1 and key not in known:
                known[key] = _chosen(module, candidates, call, size)
            answer = known.get(key, "")
            if isinstance(answer, ExpertsAdapter):
                found[fqn] = answer
            elif answer:
                whole[fqn] = answer
            if tensor_size > 1 and stacked_experts(module) is not None:
                reason = uncut(fqn)
                if (key, reason) not in known_widths:
                    tried = [(answer, size)] if isinstance(answer, ExpertsAdapter) else [(c, 1) for c in candidates]
                    known_widths[key, reason] = reason or _width_of(module, tried, call, tensor_size)
                width = known_widths[key, reason]
                if isinstance(width, Width):
                    widths[fqn] = width
                else:
                    not_cut[fqn] = width
        return FoundExperts(found, whole, widths, not_cut)

    def _is_a_stack(self, fqn: str, adapter: ExpertsAdapter) -> bool:
        """Whether the modules of a list all get everything, as layers do."""
        if not isinstance(adapter, ExpertList):
            return False
        rows = [self._rows.get(f"{fqn}.{name}") for name in adapter.names]
        tokens = self._rows[fqn]
        return None not in rows and len(set(rows)) == 1 and tokens in (None, rows[0])


def _form(tensor: Tensor) -> Tensor:
    """Something of its shape and dtype without content: what units are called with may be large."""
    with torch._C.DisableTorchFunction():
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _chosen(module: nn.Module, candidates: list[ExpertsAdapter], call: Call, size: int) -> ExpertsAdapter | str:
    """The first adapter that is right, or why none is."""
    reason = ""
    for adapter in candidates:
        if adapter.num_experts % size:
            reason = reason or f"its {adapter.num_experts} experts are no multiple of {size}"
            continue
        verdict = prove(module, adapter, call, size)
        if verdict.is_right:
            return adapter
        reason = reason or f"not the same in the proof: {verdict.reason}"
    return reason


def _width_of(module: nn.Module, tried: list[tuple[ExpertsAdapter, int]], call: Call, tensor_size: int) -> Width | str:
    """The first way to cut each expert that is right, or why none is."""
    possible, reason = possible_widths(module, tensor_size)
    for width, (adapter, size) in itertools.product(possible, tried[:1]):
        verdict = prove(module, adapter, call, size, width)
        if verdict.is_right:
            return width
        reason = reason or f"not the same in the proof: {verdict.reason}"
    return reason


def has_stacked_experts(root: nn.Module) -> bool:
    """Whether some module may hold the weights of experts stacked.

    Args:
        root: The user's module.
    """
    return any(stacked_experts(module) is not None for module in root.modules())


def _held_twice(root: nn.Module) -> set[int]:
    """Ids of parameters that several modules hold."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice
