"""Activation checkpointing: which layers of the recorded step are recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.amounts import parse_budget
from lightning_hybrid.memory.free import free_bytes
from lightning_hybrid.memory.recompute.budget import BudgetedLayers, BudgetReport
from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import Policy, Recompute, is_selective, layer_policies
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.step.objects.modules import find_layers, names_around, shortened
from lightning_hybrid.step.recording.units import experts_in_layers
from lightning_hybrid.step.tracing.compiled import compiled_modules
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.world.callbacks import RunCallback
from lightning_hybrid.strategies.world.ranks import RankWorld
from lightning_hybrid.techniques.technique import Active, Technique
from lightning_hybrid.text import spanned


class Recomputing(Technique):
    """Layers save their inputs alone, or results of expensive operations too, and run again in the backward.

    It is around the exchange of experts: a repeated forward meets the other ranks as the first one has.
    """

    def __init__(self) -> None:
        self.layers: Recomputation | None = None
        self._expected = ""

    def decide(self, run: Any) -> None:
        """Choose the layers.

        Raises:
            RecomputeError: There is no layer, no pattern matches one, or a budget would choose for what the user
                compiled.
        """
        setting = run.setting
        syncs = setting.norms is not None
        budget = budgeted_layers(setting.recompute, setting.world, setting.options, syncs_norms=syncs)
        shared = [each for technique in run.techniques for each in technique.inseparable()]
        how: dict[str, Any] = {"compiled": setting.options.compile is not None, "budget": budget, "shared": shared}
        if run.is_pipelined:
            self.layers = recompute_layers(setting.module, setting.recompute, run.plan.first, run.plan.stages, **how)
        else:
            self.layers = recompute_plain_layers(setting.module, setting.recompute, **how)

    def build(self, run: Any, owner: Any) -> Active:
        """Profile training batches, if a budget chooses the layers."""
        if self.layers is None:
            return Active()
        if self.budget is not None and run.setting.is_fitting:
            run.until_end.callback(BudgetProfile(run.setting, self.budget, owner).enter(run.setting.trainer))
            run.until_end.callback(self.budget.close)
        return _Recomputed(self.layers)

    def expect(
        self, memory: list[RankMemory], without: list[RankMemory], rank_of: Callable[[int], int]
    ) -> list[RankMemory]:
        """Return the memory of each stage with the layers that the budget is expected to keep."""
        assert self.budget is not None
        expected = expected_recomputation(self.budget, memory, without, rank_of)
        self._expected = "" if expected is None else str(expected)
        return memory if expected is None else expected.memory

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The policy of each layer."""
        return {} if self.layers is None else self.layers.policies

    @property
    def budget(self) -> BudgetedLayers | None:
        """What chooses the layers once their bytes are measured, if the user has set a budget."""
        return None if self.layers is None else self.layers.budget

    def lines(self, run: Any) -> list[str]:
        """Return which layers are recomputed."""
        return (
            []
            if self.layers is None
            else [describe_policies(self.layers.policies, run.setting.recompute, self._expected)]
        )


class _Recomputed(Active):
    """The layers of this rank, while they run."""

    def __init__(self, layers: Recomputation) -> None:
        self._layers = layers

    def running(self) -> AbstractContextManager[None]:
        """Recompute layers that run inside in their backward."""
        return self._layers.running()


def budgeted_layers(
    recompute: Recompute, world: RankWorld, options: Options, *, syncs_norms: bool
) -> BudgetedLayers | None:
    """Return what chooses by a budget, if there is one; ``syncs_norms``: BatchNorm averages over replicas."""
    budget = parse_budget(recompute)
    if budget is None:
        return None
    device, ranks_on_host = world.device, world.num_processes

    def nbytes(before: int) -> int:
        """Return the budget in bytes, from the bytes that this rank uses between steps."""
        if budget.nbytes is not None:
            return budget.nbytes
        assert budget.share is not None
        free = free_bytes(device) / (ranks_on_host if device.type == "cpu" else 1)
        if math.isinf(free):
            raise RecomputeError(
                f"recompute={recompute!r}: the free memory of {device} is unknown; set a number of bytes with its unit,"
                " such as '6GiB'",
                entry="recompute-budget",
            )
        return int(budget.share * (free + before))

    name, in_full = f"recompute={recompute!r}", options.compile is not None
    layout = world.layout
    if layout.shards_layers or layout.joins_replicas or syncs_norms:
        return AgreedLayers(world, nbytes, name, in_full=in_full)
    return BudgetedLayers(device, nbytes, name, in_full=in_full)


class AgreedLayers(BudgetedLayers):
    """Ranks that communicate in layers: a layer that one of them repeats, all repeat. Each takes the lowest choice.

    Shards of ZeRO may choose unlike layers: they gather in rounds, which any rank may begin.
    """

    is_agreed = True

    def __init__(self, world: RankWorld, budget: Callable[[int], int], name: str, *, in_full: bool) -> None:
        """Begins as `BudgetedLayers`, on all ranks of ``world``."""
        super().__init__(world.device, budget, name, in_full=in_full)
        self._world = world

    @property
    def wants_profile(self) -> bool:
        """Whether any rank would profile the next batch; collective."""
        with self._world.as_launcher():
            votes = torch.tensor(int(super().wants_profile), device=self._device)
            return bool(self._world.mesh.all_reduce(votes, "world", "max"))

    def agreed(self, levels: Mapping[str, int], error: RecomputeError | None) -> Mapping[str, int]:
        """Returns the lowest level that a rank chose for each layer; collective.

        Raises:
            RecomputeError: A rank could not choose.
        """
        rows: list[Any] = [None] * self._world.layout.world_size
        with self._world.as_launcher():
            dist.all_gather_object(rows, (levels, None if error is None else str(error)))
        if (refusal := next(filter(None, (text for _, text in rows)), None)) is not None:
            raise error or RecomputeError(f"on another rank: {refusal}", entry="recompute-budget")
        return {fqn: min(row.get(fqn, level) for row, _ in rows) for fqn, level in levels.items()}


def recompute_layers(
    root: nn.Module,
    recompute: Recompute,
    variant: TraceVariant,
    here: Collection[int],
    *,
    compiled: bool,
    budget: BudgetedLayers | None = None,
    shared: Collection[nn.Module] = (),
) -> Recomputation:
    """Return the recomputation of layers of a recorded step, as far as they are in the local stages ``here``.

    Members of the lists ``shared`` (experts that ranks share) are recomputed with the layer that routes tokens to them.

    Raises:
        RecomputeError: There is no layer, no pattern matches one, or a budget would choose for what the user compiled.
    """
    recording, assignment = variant.recording, variant.assignment
    by_user = compiled_modules(root, recording.units.values())
    policies = _policies(root, recompute, recording.units, shared, by_user, compiled=compiled)
    stages: dict[str, set[int]] = {}
    for node, stage in zip(recording.graph.nodes, assignment.node_stage, strict=True):
        if node.unit:
            stages.setdefault(node.unit, set()).add(stage)
            if recording.templates[node.index].attribute_inputs:
                # A second run would find on its modules what the next microbatch left there.
                policies |= {fqn: "keep" for fqn in policies if _is_in(fqn, node.unit)}
    local = [fqn for fqn in policies if any(_is_in(fqn, unit) and at & set(here) for unit, at in stages.items())]
    return Recomputation(_modules(root, local), policies, keyed=True, budget=budget)


def recompute_plain_layers(
    root: nn.Module,
    recompute: Recompute,
    *,
    compiled: bool,
    budget: BudgetedLayers | None = None,
    shared: Collection[nn.Module] = (),
) -> Recomputation:
    """Return the recomputation of layers where steps run unpartitioned, as ``recompute_layers``."""
    units, by_user = dict(root.named_children()), compiled_modules(root)
    policies = _policies(root, recompute, units, shared, by_user, compiled=compiled)
    return Recomputation(_modules(root, policies), policies, budget=budget)


def _policies(
    root: nn.Module,
    recompute: Recompute,
    units: Mapping[str, nn.Module],
    shared: Collection[nn.Module],
    by_user: Collection[int],
    *,
    compiled: bool,
) -> dict[str, Policy]:
    """Return the policies by layer; compiled code cannot be traced: its layers are recomputed in full.

    A named module that is no part of a unit, as stages cut it, is recomputed unit by unit.

    Raises:
        RecomputeError: There is no layer, no pattern matches one, or a budget would choose for what the user compiled.
    """
    smallest, layers = find_layers(units, shared), find_layers(units, [*shared, *experts_in_layers(root)])
    if not layers:
        raise RecomputeError(
            f"recompute={recompute!r}: {type(root).__name__} has no layers; leave recompute out", entry="recompute-none"
        )
    around = _modules(root, dict.fromkeys(name for fqn in smallest for name in (*names_around(fqn), fqn)))
    modules = {fqn: each for fqn, each in around.items() if not isinstance(each, nn.ModuleList | nn.ModuleDict)}
    policies = {
        part: policy
        for fqn, policy in layer_policies(recompute, layers, modules).items()
        for part in ([unit for unit in units if unit in around and _is_in(unit, fqn)] or [fqn])
    }
    compiled &= not (is_budget := parse_budget(recompute) is not None)  # it recomputes these in full, or not at all
    for fqn, layer in _modules(root, policies).items():
        if is_selective(policies[fqn]) and (compiled or any(id(inner) in by_user for inner in layer.modules())):
            if is_budget:
                raise RecomputeError(
                    f"recompute={recompute!r} is a budget, whose choice would be compiled into {fqn}, which you"
                    " compiled; set compile='units' instead of that, or recompute to 'full', n for every n-th layer, or"
                    " names of layers",
                    entry="recompute-budget-compiled",
                )
            policies[fqn] = "full"
    return policies


def _modules(root: nn.Module, fqns: Iterable[str]) -> dict[str, nn.Module]:
    return {fqn: root.get_submodule(fqn) for fqn in fqns}


def _is_in(fqn: str, unit: str) -> bool:
    return fqn == unit or fqn.startswith(f"{unit}.")


def describe_policies(policies: dict[str, Policy], recompute: Recompute | None, expected: str = "") -> str:
    """Return a line for each policy, with its layers, and the share that a budget is ``expected`` to recompute."""
    in_full = _runs({fqn: policy == "full" for fqn, policy in policies.items()})
    selective = _runs({fqn: is_selective(policy) for fqn, policy in policies.items()})
    lines = []
    if selective and parse_budget(recompute) is not None:
        share = expected or "the share is printed once the optimizer has stepped twice"
        lines.append(f"recomputed in the backward as recompute={recompute!r} needs it: {selective}; {share}")
    elif selective:
        lines.append(f"recomputed in the backward except expensive operations: {selective}")
    if in_full or not lines:
        requested = recompute.values() if isinstance(recompute, Mapping) else (recompute,)
        is_other = (
            any(is_selective(each) or parse_budget(each) for each in requested) and "full" not in requested and in_full
        )
        reason = " (in full: compiled)" if is_other else ""
        lines.append(f"recomputed in the backward{reason}: {in_full or 'nothing'}")
    return "\n".join(lines)


def _runs(chosen: dict[str, bool]) -> str:
    """Return the names of chosen modules, neighbours as the first, the last and their number."""
    groups = groupby(chosen.items(), lambda item: item[1])
    return ", ".join(spanned([shortened(fqn) for fqn, _ in group]) for is_chosen, group in groups if is_chosen)


class BudgetProfile(RunCallback):
    """Tells `BudgetedLayers` when batches begin and end, and which tensors there are between them."""

    def __init__(self, setting: Any, budget: BudgetedLayers, owner: Any) -> None:
        self._setting, self._budget, self._owner = setting, budget, owner
        self._is_profiling = False
        self._steps = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to profile, once the optimizer has its states."""
        begins = self._budget.wants_profile and trainer.global_step > 0
        if not (self._is_profiling or begins):
            return
        if not self._is_profiling:
            self._is_profiling, self._steps = True, trainer.global_step
        device = self._setting.device
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        self._budget.begin_batch(self._tensors(), allocated)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The backwards are over."""
        self._budget.begin_optimizer_step()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Choose, if the optimizer has stepped."""
        if not self._is_profiling:
            return
        has_stepped = trainer.global_step > self._steps
        self._is_profiling = not has_stepped
        if self._budget.end_batch(has_stepped=has_stepped) and self._budget.report is not None:
            rank_zero_info(describe_choices(self._budget.report, self._setting.recompute))

    def _tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers, gradients, messages of gradients and optimizer states, without those in files."""
        in_files = {what for what, place in self._owner.run.places.items() if place == "files"}
        module = self._setting.module
        for parameter in module.parameters():
            if "parameters" not in in_files:
                yield parameter
            if parameter.grad is not None and "gradients" not in in_files:
                yield parameter.grad
        yield from module.buffers()
        for reducer in self._owner.optimization.reducers.every:
            yield from reducer.messages
        if "optimizer_states" not in in_files:
            for optimizer in self._setting.trainer.optimizers:
                states = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
                yield from (leaf for leaf in states if isinstance(leaf, Tensor))


def describe_choices(report: BudgetReport, recompute: Any) -> str:
    """Return the line that the first rank prints once its recomputation is chosen."""
    shares = list(report.kept_share.values())
    everything = sum(share == 1.0 for share in shares)
    least = f"; the others keep {100 * min(shares):.0f} % or more of their bytes" if everything < len(shares) else ""
    least = "; the others are recomputed in full" if least and set(shares) <= {0.0, 1.0} else least
    return (
        f"recompute={recompute!r}: {report.budget:,.0f} bytes on the first rank, {report.floor:,.0f} bytes are"
        f" the least; {everything} of {len(shares)} layers keep everything{least};"
        f" {100 * report.recomputed_share:.0f} % of all bytes that layers would save are recomputed"
    )


class ExpectedRecomputation(NamedTuple):
    """What a budget is expected to choose."""

    memory: list[RankMemory]  # of each stage
    shares: list[float]  # of the bytes that layers would save, by pipeline rank: the part that is recomputed

    def __str__(self) -> str:
        """The shares in words."""
        least, most = (f"{100 * share:.0f}" for share in (min(self.shares), max(self.shares)))
        return f"{least if least == most else f'{least} to {most}'} % of what they save, as estimated"


def expected_recomputation(
    budget: BudgetedLayers,
    floor: Sequence[RankMemory],
    full: Sequence[RankMemory],
    rank_of: Callable[[int], int],
) -> ExpectedRecomputation | None:
    """Return what a budget is expected to choose, from ``floor`` to ``full`` memory; None where these are unknown."""
    saved = [(low.activations, high.activations) for low, high in zip(floor, full, strict=True)]
    known = [(low, high) for low, high in saved if low is not None and high is not None]
    if len(known) < len(saved):
        return None
    stages: dict[int, list[int]] = {}
    for number in range(len(floor)):
        stages.setdefault(rank_of(number), []).append(number)
    try:
        allowed = budget.allowed_bytes(floor[0].parameters)
    except RecomputeError:  # it is raised where the budget is used
        return None
    memory, shares = list(floor), []
    for _, numbers in sorted(stages.items()):
        most = sum(known[number][1] - known[number][0] for number in numbers)
        left = allowed - sum(floor[number].total for number in numbers)
        kept = min(1.0, max(0.0, left / most)) if most > 0 else 1.0
        shares.append(1.0 - kept)
        for number in numbers:
            low, high = known[number]
            working = floor[number].working + kept * (full[number].working - floor[number].working)
            kept_bytes = int(low + kept * (high - low))
            memory[number] = dataclasses.replace(floor[number], activations=kept_bytes, working=int(working))
    return ExpectedRecomputation(memory, shares)
