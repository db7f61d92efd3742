"""How much of a model's layers is cut over tensor ranks: counted from its plans, and noted in runs on ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_hybrid.parts.parameter_shard_placement import Shard
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan

_UNCALLED = "the step does not call it"


@dataclass(frozen=True)
class Cut:
    """What became of the weights that the layers in lists multiply by: of attentions, MLPs and the like.

    Attributes:
        sharded: Elements in pairs: cut on both sides, one sum for both.
        gathered: Elements that are cut alone, with their output gathered.
        whole: Elements that every rank holds.
        batched: Those of them that lie in one parameter for all experts.
        why: FQN inside the unit and reason -> elements that are gathered or whole for it.
        seconds: For each unit that was searched, and not found like another one, how long that took.
    """

    sharded: int = 0
    gathered: int = 0
    whole: int = 0
    batched: int = 0
    why: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The sharded part; None if there is no such weight."""
        total = self.sharded + self.gathered + self.whole
        return self.sharded / total if total else None

    @property
    def share_without_experts(self) -> float | None:
        """The same of what is not batched."""
        total = self.sharded + self.gathered + self.whole - self.batched
        return self.sharded / total if total else None


def cut_of(root: nn.Module, plans: Mapping[str, UnitPlan], *, within: str = "", by_width: Collection[str] = ()) -> Cut:
    """Count; units that the step does not call are left out.

    Args:
        root: The module.
        plans: Of its tensor units, by FQN.
        within: Only parameters whose FQN has this in it.
        by_width: FQNs of stacked experts that are cut besides, by their width.
    """
    counts = dict.fromkeys(("sharded", "gathered", "whole", "batched"), 0)
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
                    kind, reason = "whole", f"{full}: {plan.replicated_reasons.get(full, 'no reason')}"
                elif plan.roles.get(owner_fqn) == "gathered":
                    [how] = [group.how for group in plan.groups if owner_fqn in group.columns]
                    kind, reason = "gathered", f"{full}: {how}"
                counts[kind] += parameter.numel()
                if kind == "whole" and parameter.dim() == 3 and not isinstance(owner, _ConvNd):
                    counts["batched"] += parameter.numel()
                if reason:
                    why[reason] = why.get(reason, 0) + parameter.numel()
    return Cut(**counts, why=why, seconds={fqn: plan.seconds for fqn, plan in plans.items() if plan.seconds})


class NotesCut(Callback):
    """Notes on a rank how the layers are cut."""

    cut = Cut()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        shards = getattr(getattr(trainer.strategy, "run", None), "shards", None)
        if shards is not None:
            cut = {
                name for axis in trainer.strategy.run.parts.shardings if axis.axis == "tp" for name in axis.placements
            }
            for fqn, plan in shards.plans.items():
                cut -= {f"{fqn}.{name}" for name, how in plan.placements.items() if isinstance(how, Shard)}
            NotesCut.cut = cut_of(pl_module, shards.plans, by_width=cut)


def with_cut(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Cut]:
    """On a rank: call a function that fits with a `NotesCut`, and say what that noted."""
    NotesCut.cut = Cut()
    return function(*args), NotesCut.cut


class Noting:
    """Runs functions on ranks, as ``Worlds.run`` does, and keeps what the last one noted."""

    def __init__(self, run: Callable[..., list[Any]]) -> None:
        self._run, self.cut = run, Cut()

    def __call__(self, n: int, function: Callable[..., Any], /, *args: Any, timeout: float) -> list[Any]:
        results = self._run(n, with_cut, function, args, timeout=timeout)
        self.cut = results[0][1]
        return [result for result, _ in results]
