"""The fraction of a model's layers that is sharded over tensor ranks: from its plans, and recorded on ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan

_UNCALLED = "the step does not call it"


@dataclass(frozen=True)
class ShardedFraction:
    """Counts of the weights of the layers in lists: of attentions, MLPs and the like.

    Attributes:
        sharded: Elements in pairs: sharded on both sides, one sum for both.
        gathered: Elements that are sharded singly, with their output gathered.
        replicated: Elements that every rank has.
        batched: Those of them in one parameter for all experts.
        why: FQN inside the unit and reason -> elements that are gathered or replicated for it.
        seconds: For each unit that was searched, and not equal to another one, the duration.
    """

    sharded: int = 0
    gathered: int = 0
    replicated: int = 0
    batched: int = 0
    why: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The sharded fraction; None if there is no such weight."""
        total = self.sharded + self.gathered + self.replicated
        return self.sharded / total if total else None

    @property
    def share_without_experts(self) -> float | None:
        """The same of weights that are not batched."""
        total = self.sharded + self.gathered + self.replicated - self.batched
        return self.sharded / total if total else None


def fraction_of(
    root: nn.Module, plans: Mapping[str, UnitPlan], *, within: str = "", by_width: Collection[str] = ()
) -> ShardedFraction:
    """Counts the weights, except of units that the step does not call.

    Args:
        root: The module.
        plans: Of its tensor units, by FQN.
        within: Only parameters whose FQN contains this.
        by_width: FQNs of stacked experts that are sharded too, by their width.
    """
    counts = dict.fromkeys(("sharded", "gathered", "replicated", "batched"), 0)
    why: dict[str, int] = {}
    for fqn, plan in plans.items():
        if not any(name.isdecimal() for name in fqn.split(".")) or _UNCALLED in plan.replicated_reasons.values():
            continue
        unit = root.get_submodule(fqn)
        for owner_fqn, owner in unit.named_modules():
            for name, parameter in owner.named_parameters(recurse=False):
                full = f"{owner_fqn}.{name}" if owner_fqn else name
                if parameter.dim() < 2 or isinstance(owner, nn.Embedding) or within not in f"{fqn}.{full}":
                    continue
                kind, reason = "sharded", ""
                if f"{fqn}.{full}" in by_width:
                    pass
                elif not isinstance(plan.placements.get(full), Shard):
                    kind, reason = "replicated", f"{full}: {plan.replicated_reasons.get(full, 'no reason')}"
                elif plan.roles.get(owner_fqn) == "gathered":
                    [how] = [group.how for group in plan.groups if owner_fqn in group.columns]
                    kind, reason = "gathered", f"{full}: {how}"
                counts[kind] += parameter.numel()
                if kind == "replicated" and parameter.dim() == 3 and not isinstance(owner, _ConvNd):
                    counts["batched"] += parameter.numel()
                if reason:
                    why[reason] = why.get(reason, 0) + parameter.numel()
    return ShardedFraction(
        **counts, why=why, seconds={fqn: plan.seconds for fqn, plan in plans.items() if plan.seconds}
    )


class RecordsFraction(Callback):
    """Records on a rank how the layers are sharded."""

    cut = ShardedFraction()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        shards = getattr(getattr(trainer.strategy, "run", None), "shards", None)
        if shards is not None:
            cut = {
                name for axis in trainer.strategy.run.parts.shardings if axis.axis == "tp" for name in axis.placements
            }
            for fqn, plan in shards.plans.items():
                cut -= {f"{fqn}.{name}" for name, how in plan.placements.items() if isinstance(how, Shard)}
            RecordsFraction.cut = fraction_of(pl_module, shards.plans, by_width=cut)


def with_fraction(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ShardedFraction]:
    """On a rank: call a function that fits with a `RecordsFraction`, and return its record."""
    RecordsFraction.cut = ShardedFraction()
    return function(*args), RecordsFraction.cut


class RecordingRun:
    """Runs functions on ranks, as ``Worlds.run`` does, and stores the last one's record."""

    def __init__(self, run: Callable[..., list[Any]]) -> None:
        self._run, self.cut = run, ShardedFraction()

    def __call__(self, n: int, function: Callable[..., Any], /, *args: Any, timeout: float) -> list[Any]:
        results = self._run(n, with_fraction, function, args, timeout=timeout)
        self.cut = results[0][1]
        return [result for result, _ in results]
