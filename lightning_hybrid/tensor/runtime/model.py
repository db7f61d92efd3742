"""A model whose units are sharded over tensor ranks: the shards that a rank holds, and the forwards of units.

A sharded parameter holds this rank's shard in the user's ``Parameter`` object: optimizers, the reduction over replicas
and clipping get nothing else. Buffers stay full: a sharded unit works on its shard of them, and then gathers them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.logits.sharded import represent
from lightning_hybrid.logits.vocabulary import Vocabulary
from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.params.placement import Placement, Shard, join, padded
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.tensor_ranks import FullParameterReads
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.shared_memory.collectives import hidden_from_modes
from lightning_hybrid.step.objects.modules import spanned_modules
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call
from lightning_hybrid.step.recording.layers import UnitKinds
from lightning_hybrid.step.standins.tensors import FULL_SHAPE, is_absent, materialize_call
from lightning_hybrid.step.tracing.compiled import compiled_modules
from lightning_hybrid.tensor.collectives import GroupRanks, Ranks, paired
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.region import AroundDraw
from lightning_hybrid.tensor.runtime.compiled import CompiledRegionInputs, compiled_forwards
from lightning_hybrid.tensor.runtime.proved import ProvedCalls
from lightning_hybrid.tensor.runtime.unit import ShardedUnit

# Attributes of a parameter that are equal for its shard, or belong to the shard.
_OF_SHARD = frozenset({"grad", "requires_grad", "is_leaf", "grad_fn", "_backward_hooks", "device", "dtype", "layout"})
_IDENTITY = frozenset({"__hash__", "requires_grad_", "register_hook", "__set__", "__delete__"})


class ShardedModel:
    """The sharded units of one model on one rank.

    Attributes:
        plans: The plans by FQN of the unit.
        shardings: The sharding of parameters over each axis: of some over tensor ranks, of none over context ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        plans: Mapping[str, UnitPlan],
        group: dist.ProcessGroup,
        context: dist.ProcessGroup,
        context_places: Mapping[str, int],
        lines_of_branch: Callable[..., frozenset[int]],
    ) -> None:
        """Reads placements from the plans, before parameters are sharded.

        ``group`` are the tensor ranks. ``lines_of_branch`` proves a plan of a unit with the arguments of one call; it
        returns the lines that have called torch in that proof, none if it fails.
        """
        self.plans = dict(plans)
        self._root = root
        self._group, self._context = group, context
        self._runners: dict[str, ShardedUnit] = {}
        self._buffers: dict[str, ShardedBuffers] = {}
        self._reads: FullParameterReads | None = None
        self._warn: Callable[[str], None] = warnings.warn
        self._proved: dict[str, ProvedCalls] = {}  # of units that run code of the user
        self._lines_of_branch = lines_of_branch
        self._branches: list[tuple[Any, frozenset[int]]] = []  # the proofs that were made in the run, and their lines
        # What the last calls did that their units' plans were not proved for, by FQN; "" once the user is warned.
        self._unproved: dict[str, str] = {}
        self._compiled: dict[ShardedUnit, Any] = {}  # the compiled forwards of units
        self._over_context: frozenset[str] = frozenset()  # parameters (of experts) that context ranks shard
        self._users_over_context: dict[str, ShardedUnit] = {}  # units that use them, on sequence shards
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        placements: dict[str, Shard] = {}
        for fqn, plan in plans.items():
            for name, parameter in root.get_submodule(fqn).named_parameters(remove_duplicate=False):
                placement = plan.placements.get(name)
                if isinstance(placement, Shard):
                    placements[self._names[id(parameter)]] = placement
        axes = [
            AxisSharding(group, placements, "tp"),
            AxisSharding(context, {}, axis="cp", places=context_places),
        ]
        self.shardings = [axis for axis in axes if axis.group.size() > 1]

    def be_ready(
        self,
        around: Callable[[int], AroundDraw],
        warn: Callable[[str], None],
        isolated: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Prepares the units to run, once each parameter holds this rank's shard.

        ``around`` makes a context around draws that differ by its number: for regions that of this rank among tensor
        ranks times context ranks, for positions one of the context rank alone. ``isolated`` makes one around
        trials.
        """
        self._warn = warn
        # One object of each, so that units recognise that sequences are sharded over the same ranks.
        ranks, context = GroupRanks(self._group), GroupRanks(self._context)
        both = paired(ranks, context)
        around_draw = around_local = around(both.rank)
        if both.size not in (ranks.size, context.size):
            around_local = around(both.size + context.rank)
        keeps_sharded = not compiled_modules(self._root)  # a compiler does not support the lazy full tensors
        kinds = UnitKinds()
        for fqn, proved in self.plans.items():
            unit = self._root.get_submodule(fqn)
            plan = self._without_exchange(fqn, unit, proved)
            if plan.is_sharded and not any(is_absent(parameter) for parameter in unit.parameters()):
                self._buffers[fqn] = ShardedBuffers(unit, plan.placements, ranks)
                runner = self._runners[fqn] = ShardedUnit(
                    unit,
                    plan,
                    ranks,
                    context=context,
                    tensors=self._buffers[fqn].local,
                    around_draw=around_draw,
                    around_local_draw=around_local,
                    fqn=fqn,
                    keeps_sharded=keeps_sharded,
                )
                if plan.calls and not all(type(module).__module__.startswith("torch.") for module in unit.modules()):
                    prove = partial(self._prove_branch, kinds.kind_of(fqn, unit), unit, plan)
                    self._proved[fqn] = ProvedCalls(unit, plan.calls, runner, prove, isolated)
                if proved.positions is not None and plan.positions is not None:
                    summed = {f"{fqn}.{name}" for name in proved.positions.summed_over_context}
                    self._users_over_context.update(dict.fromkeys(summed & self._over_context, runner))

    def why_not_sharded_elsewhere(self, name: str) -> str:
        """The reason why another technique cannot shard a parameter (FQN in the root) over tensor ranks; or ""."""
        for fqn, plan in self.plans.items():
            inner = name.removeprefix(f"{fqn}.")
            if inner == name or inner not in plan.placements:
                continue
            if isinstance(plan.placements[inner], Shard) or inner in plan.summed:
                return "the layer's plan shards them already"
            if plan.positions is not None and inner in plan.positions.summed_over_tensor:
                return "tensor ranks have different positions there (sequence_parallel)"
        return ""

    def mark_sharded_elsewhere(self, names: Collection[str]) -> None:
        """Removes parameters (FQNs in the root) that another technique shards from the plans' replicated ones."""
        for fqn, plan in self.plans.items():
            replicated_reasons = {
                name: reason for name, reason in plan.replicated_reasons.items() if f"{fqn}.{name}" not in names
            }
            self.plans[fqn] = replace(plan, replicated_reasons=replicated_reasons)

    def set_sharded_over_context(self, names: Collection[str]) -> None:
        """Sets parameters of experts (FQNs in the root) that are sharded over context ranks; called before `be_ready`.

        Their gradients are summed elsewhere.
        """
        self._over_context = frozenset(names)

    def _without_exchange(self, fqn: str, unit: nn.Module, plan: UnitPlan) -> UnitPlan:
        if plan.positions is None or plan.by == "tensor" or not self._over_context:
            return plan
        if all(f"{fqn}.{name}" in self._over_context for name, _ in unit.named_parameters()):
            # A unit that is an expert: its rows come from all context ranks, so it cannot exchange with them.
            return plan.full_sequence_plan or replace(plan, positions=None)
        summed = tuple(n for n in plan.positions.summed_over_context if f"{fqn}.{n}" not in self._over_context)
        return replace(plan, positions=replace(plan.positions, summed_over_context=summed))

    def sees_local_positions(self, name: str) -> bool:
        """Whether the unit that uses a parameter (FQN in the root) works on this context rank's positions alone now."""
        runner = self._users_over_context.get(name)
        return runner is not None and runner.has_local_positions

    def compile(self, fqn: str, run: Callable[..., Any]) -> None:
        """Sets ``run(unit, entered, args, kwargs)``, the compiled forward of a unit that `why_not_compiled` allows."""
        runner = self._runners.get(fqn)
        if runner is None:
            return
        unit, entered = self._root.get_submodule(fqn), CompiledRegionInputs()
        forwards = compiled_forwards(dict(unit.named_modules()), self.plans[fqn], self._group, entered)
        self._compiled[runner] = lambda *args, **kwargs: run(unit, entered, args, kwargs), forwards

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which units that `compile` was called for run compiled."""
        for runner, compiled in self._compiled.items():
            runner.compile_with(compiled)
        try:
            yield
        finally:
            for runner in self._compiled:
                runner.compile_with(None)

    def outside_reads(self) -> AbstractContextManager[Any]:
        """A context around the user's step, in which code outside of units may use vocabulary-parallel weights."""
        found = {}
        for fqn, plan in self.plans.items():
            unit = self._root.get_submodule(fqn)
            for inner in plan.outside:
                parameter = unit.get_parameter(inner)
                if FULL_SHAPE in parameter.__dict__:
                    found[id(parameter)] = self.shardings[0].placements[self._names[id(parameter)]]
        return WeightsOutsideUnits(found, GroupRanks(self._group)) if found else contextlib.nullcontext()

    def vocabularies(self) -> dict[str, Vocabulary]:
        """The row ranges of the weights of output heads, and their biases, that are sharded; by FQN in the root."""
        ranks, found = GroupRanks(self._group), dict[str, Vocabulary]()
        for fqn, plan in self.plans.items():
            unit = self._root.get_submodule(fqn)
            for inner in () if plan.watched else (name for name, dim in plan.vocabulary.items() if dim == 0):
                name = self._names[id(unit.get_parameter(inner))]
                found[name] = Vocabulary(self.shardings[0].placements[name].length, ranks)
        return found

    def gather_on_read(self, guards: ReadGuards, agreement: HookAgreement, further: Collection[str]) -> None:
        """Gathers parameters when code outside of units reads them, where no recording shows what it reads.

        ``further`` are FQNs of parameters that other ranks share too.
        """
        used_outside = {f"{fqn}.{name}" for fqn, plan in self.plans.items() for name in plan.outside}
        cut = next((axis for axis in self.shardings if axis.axis == "tp" and axis.placements), None)
        if cut is not None:
            self._reads = FullParameterReads(self._root, cut, used_outside, guards, agreement, further)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the units run sharded."""
        units = {fqn: self._root.get_submodule(fqn) for fqn in self._runners}
        reads = self._reads

        def run(fqn: str, full: Callable[..., Any]) -> Callable[..., Any]:
            sharded = self._buffers[fqn].gathered_after(self._runners[fqn].run_sharded)
            if reads is not None:
                sharded, full = reads.of_layer(units[fqn], sharded), reads.of_full_layer(units[fqn], full)
            return partial(self._sharded_or_full, fqn, sharded, full)

        forwards = replaced_forwards(units, run, reason="runs sharded units")
        with contextlib.nullcontext() if reads is None else reads.on(), forwards:
            yield
        self._warn_of_unproved()

    def _sharded_or_full(
        self, fqn: str, sharded: Callable[..., Any], full: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """A unit's forward; calls that its plan was not proved for run full on each rank, as code outside of units."""
        where = self._proved[fqn].first_deviation(sharded, full, args, kwargs) if fqn in self._proved else ""
        if not where:
            return sharded(*args, **kwargs)
        self._unproved.setdefault(fqn, where)
        args, kwargs = materialize_call(args, kwargs)
        return full(*args, **kwargs)

    def _prove_branch(
        self, kind: int, unit: nn.Module, plan: UnitPlan, new: frozenset[int], args: Any, kwargs: Any
    ) -> frozenset[int]:
        """The lines of the proof for a call, which is made if no unit of the kind has run these new lines before."""
        key = kind, new, replace(plan, num_trials=0, seconds=0.0)
        known = next((lines for other, lines in self._branches if other == key), None)
        if known is None:
            known = self._lines_of_branch(unit, args, kwargs, key[2])
            self._branches.append((key, known))
        return known

    def _warn_of_unproved(self) -> None:
        """Warns once of each unit that ran full in the step, in one warning for the units that do so for one reason."""
        reasons: dict[str, list[str]] = {}
        for fqn, where in self._unproved.items():
            if where:
                reasons.setdefault(where, []).append(fqn)
        self._unproved = dict.fromkeys(self._unproved, "")
        for where, fqns in reasons.items():
            self._warn(
                f"{spanned_modules(fqns)}: some batches run unsharded, with full weights on every tensor rank. They run"
                " code for which the check of the sharded layer against the full one has failed"
                f" ({where}); other batches run sharded"
            )

    def forget(self) -> None:
        """Drops the units: parameters are full again."""
        self._runners, self._proved, self._buffers, self._compiled, self._users_over_context = {}, {}, {}, {}, {}
        self._reads = None


# Buffers of a sharded unit: each tensor rank updates its shard, and all of them have the full buffers after a forward.
# So code outside of units, checkpoints and forwards that run unsharded read what a single process would have.


class ShardedBuffers:
    """The buffers of one unit that its plan shards over tensor ranks."""

    def __init__(self, unit: nn.Module, placements: Mapping[str, Placement], ranks: Ranks) -> None:
        """Selects the buffers of a unit that holds them in full."""
        self._unit, self._ranks = unit, ranks
        found = {name: placements.get(name) for name, _ in unit.named_buffers()}
        self._placements = {name: placement for name, placement in found.items() if isinstance(placement, Shard)}
        owners = {name: unit.get_submodule(name.rpartition(".")[0]) for name in self._placements}
        # Torch's norms write their statistics in training mode only.
        self._unknown = [name for name, owner in owners.items() if not type(owner).__module__.startswith("torch.")]
        self._norms = [(name, owner) for name, owner in owners.items() if name not in self._unknown]

    def local(self) -> dict[str, Tensor]:
        """This rank's shards, of shape (..., local length, ...), as views of the full buffers."""
        rank, size = self._ranks.rank, self._ranks.size
        return {
            name: placement.view(self._unit.get_buffer(name), rank, size)
            for name, placement in self._placements.items()
        }

    def gathered_after(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the unit's sharded forward: buffers that it may have written are full on all ranks after it."""
        if not self._placements:
            return run

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            written = self._unknown + [name for name, owner in self._norms if owner.training]
            if written:
                self._gather(written)
            return output

        return forward

    @torch.compiler.disable
    @torch.no_grad()
    def _gather(self, names: list[str]) -> None:
        """All-gathers these buffers in one message; collective over the tensor ranks."""
        local = self.local()
        # As the kernel of batch norms, which does not change the version: a backward needs none of the statistics.
        full = {name: self._unit.get_buffer(name) for name in names}
        with hidden_from_modes(), torch.autograd._unsafe_preserve_version_counter(tuple(full.values())):
            shards = [padded(local[name], self._placements[name]).contiguous() for name in names]
            message = torch.cat([shard.reshape(-1).view(torch.uint8) for shard in shards])
            rows = [row.split([shard.nbytes for shard in shards]) for row in self._ranks.all_gather(message)]
            for index, (name, shard) in enumerate(zip(names, shards, strict=True)):
                # A slice may begin at an offset that is not aligned for this dtype.
                of_ranks = [row[index].clone().view(shard.dtype).view(shard.shape) for row in rows]
                full[name].copy_(join(of_ranks, self._placements[name]))


class WeightsOutsideUnits(TorchFunctionMode):
    """A mode in which operations on a vocabulary-parallel weight get it as a tensor of the full shape."""

    def __init__(self, placements: Mapping[int, Shard], ranks: Ranks) -> None:
        """Takes the placements by id of the parameter, which holds this rank's shard, and the ranks of all shards."""
        super().__init__()
        self._sharded = {
            key: (placement.dim, Vocabulary(placement.length, ranks)) for key, placement in placements.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _IDENTITY or (name == "__get__" and func.__self__.__name__ in _OF_SHARD):
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        if any(id(leaf) in self._sharded for leaf in leaves):
            leaves = [represent(x, *self._sharded[id(x)]) if id(x) in self._sharded else x for x in leaves]
            args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        return func(*args, **kwargs)
