"""Finds a plan for one unit: discovers candidates, tries variants of each, proves them together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from lightning_hybrid.tensor.attention import attention_placements
from lightning_hybrid.tensor.discover import discover
from lightning_hybrid.tensor.examples import Example, make_example
from lightning_hybrid.tensor.placement import Placement, Replicated, Shard
from lightning_hybrid.tensor.plan import Group, Role, Rule, Site, UnitPlan
from lightning_hybrid.tensor.prove import Proof
from lightning_hybrid.tensor.sequence import deal_positions, in_context
from lightning_hybrid.tensor.trial import Exact, TrialRanks, random_copy
from lightning_hybrid.tensor.variants import Variant, variants

# A lone linear with less than this share of the unit's parameters is not worth a gather.
_SMALL_SHARE = 0.01
# How many more variants are tried for one that needs no watch, once one is found that does.
_MORE_TRIALS = 6


@dataclass
class Part:
    """A group with what it adds to a plan.

    Attributes:
        group: The linears.
        placements: Of parameters and buffers that are cut.
        attributes: Whole numbers that are divided.
        offsets: Whether offsets into columns' outputs are written in terms of the whole.
        rules: What is rewritten.
        summed: Replicated parameters whose gradients are summed.
        outputs: Results of the unit that come out cut: place -> dim.
        watched: Whether it needs a watch.
        avoidable: Whether only for sizes and offsets that another variant might get right by itself.
    """

    group: Group
    placements: dict[str, Placement]
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    offsets: bool = False
    rules: dict[Site, Rule] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    outputs: dict[int, int] = field(default_factory=dict)
    watched: bool = False
    avoidable: bool = False

    def roles(self) -> dict[str, Role]:
        """The role of each linear."""
        return {**dict.fromkeys(self.group.columns, self.group.role), **dict.fromkeys(self.group.rows, "row")}


def plan_unit(
    unit: nn.Module,
    example_args: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None,
    size: int,
    *,
    whole: Mapping[str, str] | None = None,
    deal: Literal["tensor", "context"] | None = None,
    seed: int = 0,
) -> UnitPlan:
    """Find how a unit can be sharded over tensor ranks, and prove it.

    The unit itself, its weights and torch's generators are left alone: everything is tried on a copy with random
    weights. The same unit, arguments and seed give the same plan.

    Args:
        unit: The smallest module that a cut never enters.
        example_args: Arguments of one call, as in training: what needs a gradient there, needs one here. Tensors
            without content will do.
        example_kwargs: Its keyword arguments.
        size: Number of tensor ranks.
        whole: Parameters that must stay whole, each with the reason, by FQN inside the unit.
        deal: Deal positions of the sequence to the ranks as well ("tensor": sequence parallelism), or them alone
            ("context").
        seed: Of the random weights.

    Returns:
        A proved plan; at worst one that keeps everything whole and says why.
    """
    began = time.perf_counter()
    if size < 1:
        raise ValueError(f"tensor_parallel_size={size}; it must be at least 1")
    with torch.random.fork_rng(devices=[]):
        plan = _Search(unit, size, seed, whole or {}, deal).run(example_args, example_kwargs or {})
    return replace(plan, seconds=time.perf_counter() - began)


class _Search:
    def __init__(
        self,
        unit: nn.Module,
        size: int,
        seed: int,
        kept: Mapping[str, str],
        deal: Literal["tensor", "context"] | None,
    ) -> None:
        self._user_unit, self._size, self._kept, self._deal = unit, size, kept, deal
        self._generator = torch.Generator().manual_seed(seed)
        self._reasons: dict[str, str] = dict(kept)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitPlan:
        if self._size == 1:
            return self._whole("there is one tensor rank")
        errors: list[Exception] = []
        # Some kernels have no float64; float32 tells right from wrong too, less sharply.
        for self._dtype in (torch.float64, torch.float32):
            try:
                self._unit = random_copy(self._user_unit, self._generator, self._dtype)
            except Exception as error:
                return self._whole(f"the unit cannot be copied: {type(error).__name__}: {error}")
            example = make_example(
                args, kwargs, self._unit, self._size, lambda e: self._runs(e, errors), self._generator, self._dtype
            )
            if example is not None:
                break
        else:
            return self._whole(f"a copy of the unit with random weights does not run: {errors[-1]}")
        self._ranks = TrialRanks(self._unit, self._size)
        self._proof = Proof(self._unit, example, self._ranks, self._dtype)
        self._found = discover(self._unit, lambda: self._call(example))
        parts = [*self._attentions(), *self._pairs()]
        if self._deal == "context":
            return self._in_context(parts)
        parts += self._gathered({fqn for part in parts for fqn in part.roles()})
        plan = self._prove(parts)
        if self._deal is not None and plan.num_sharded:
            plan = deal_positions(self._unit, plan, self._proof, self._deal)
        return replace(plan, num_trials=self._ranks.num_trials)

    def _in_context(self, parts: list[Part]) -> UnitPlan:
        """Positions dealt throughout, and exchanged for features only where positions are mixed."""
        best = self._dealt_in_context(parts)
        for part in list(parts):
            if best.positions is None or part.group.role == "attention":
                continue
            fewer = [other for other in parts if other is not part]
            without = self._dealt_in_context(fewer)
            if without.positions is not None:
                best, parts = without, fewer
        return replace(best, num_trials=self._ranks.num_trials)

    def _dealt_in_context(self, parts: list[Part]) -> UnitPlan:
        plan = in_context(self._plan(parts))
        if not isinstance(plan, str):
            plan = deal_positions(self._unit, plan, self._proof, "context")
            if not plan.undealt:
                return plan
            plan = plan.undealt
        return replace(self._whole("context ranks hold all parameters"), undealt=plan)

    def _call(self, example: Example) -> None:
        args, kwargs, _ = example.call()
        with Exact(self._dtype):
            self._unit(*args, **kwargs)

    def _runs(self, example: Example, errors: list[Exception]) -> bool:
        try:
            with torch.no_grad():
                self._call(example)
            return True
        except Exception as error:
            errors.append(error)
            return False

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _attentions(self) -> list[Part]:
        parts = []
        for fqn in self._found.attentions:
            module = self._unit.get_submodule(fqn)
            assert isinstance(module, nn.MultiheadAttention)
            if module.num_heads % self._size:
                self._keep(
                    [f"{fqn}.{name}" if fqn else name for name, _ in module.named_parameters()],
                    f"{module.num_heads} heads are not a multiple of {self._size} ranks",
                )
                continue
            group = Group("attention", (fqn,), how="by heads")
            part, reason = self._tried(Part(group, attention_placements(fqn, module, self._size)))
            if part is not None:
                parts.append(part)
            else:
                self._keep([f"{fqn}.{name}" if fqn else name for name, _ in module.named_parameters()], reason)
        return parts

    def _pairs(self) -> list[Part]:
        parts = []
        for columns, rows in self._found.candidates():
            best: Part | None = None
            more = _MORE_TRIALS
            for variant in variants(self._unit, self._found, columns, rows, self._size):
                if best is not None and (not best.avoidable or not more):
                    break
                more -= best is not None
                part, _ = self._tried(_part(columns, rows, variant))
                if part is not None and (best is None or not part.watched):
                    best = part
            if best is not None:
                parts.append(best)
        return parts

    def _gathered(self, taken: set[str]) -> list[Part]:
        """Linears that pair with no other, with their outputs gathered."""
        total = sum(p.numel() for p in self._unit.parameters())
        parts = []
        for fqn, linear in self._found.linears.items():
            if fqn in taken:
                continue
            names = [linear.parameter(name) for name in ("weight", "bias")[: 1 + linear.has_bias]]
            numel = sum(self._unit.get_parameter(name).numel() for name in names)
            if linear.num_out % self._size:
                self._keep(names, f"{linear.num_out} output features are not a multiple of {self._size} ranks")
            elif numel < _SMALL_SHARE * total:
                self._keep(names, "too small to be worth a gather")
            else:
                dims = dict(zip(names, (linear.out_dim, 0), strict=False))
                cuts: dict[str, Placement] = {
                    name: Shard.evenly(dim, linear.num_out, self._size) for name, dim in dims.items()
                }
                part, reason = self._tried(Part(Group("gathered", (fqn,), how="output gathered"), cuts))
                if part is not None:
                    parts.append(part)
                else:
                    self._keep(names, reason)
        return parts

    def _keep(self, fqns: list[str], reason: str) -> None:
        for fqn in fqns:
            self._reasons.setdefault(fqn, reason)

    # --- trials -------------------------------------------------------------------------------------------------------

    def _tried(self, part: Part) -> tuple[Part | None, str]:
        """The part with what a trial of it alone showed, or None and why it is wrong."""
        if any(not _fits(self._unit, fqn, placement) for fqn, placement in part.placements.items()):
            return None, "its sizes cannot be divided"
        if kept := self._kept.keys() & part.placements.keys():
            return None, f"pairs with {min(kept)}, {self._kept[min(kept)]}"
        rules: dict[Site, Rule] = {}
        failure = self._proof.difference(self._plan([part], rules=rules), self._proof.first, learning=True)
        if failure is not None and self._proof.cut_outputs:
            part.outputs = self._proof.cut_outputs
            rules = {}
            failure = self._proof.difference(self._plan([part], rules=rules), self._proof.first, learning=True)
        watch = self._ranks.watches[0]
        if failure is None:
            # Code that runs in eval mode alone has rules too.
            failure = self._proof.difference(self._plan([part], rules=rules), self._proof.settings[-2], learning=True)
        if failure is not None or watch is None:
            return None, failure or "nothing ran sharded"
        sliced = {
            fqn: dim for fqn, dim in watch.sliced.items() if fqn not in watch.inside | watch.outside | self._kept.keys()
        }
        for fqn, dim in sliced.items():
            shape = self._named(fqn).shape
            part.placements[fqn] = Shard.evenly(dim % len(shape), shape[dim], self._size)
        mixed = watch.inside & watch.outside | (set(watch.sliced) - set(sliced))
        part.summed = tuple(sorted(watch.inside - mixed - set(part.placements)))
        # A parameter that is cut from now on need not be sliced at its use.
        part.rules = {site: rule for site, rule in rules.items() if site[1] != "side" or site[3] not in sliced}
        must = bool(mixed or part.outputs) or watch.entered or watch.drew
        made = [(site, rule) for site, rule in part.rules.items() if rule]
        part.watched = must or bool(made)
        part.avoidable = bool(made) and not must and all(_is_size(site, rule) for site, rule in made)
        return part, ""

    def _named(self, fqn: str) -> torch.Tensor:
        owner, _, name = fqn.rpartition(".")
        value = getattr(self._unit.get_submodule(owner), name)
        assert isinstance(value, torch.Tensor)
        return value

    def _prove(self, parts: list[Part]) -> UnitPlan:
        """All parts together, in every mode; without those that spoil it, if there are such."""
        plan = self._plan(parts)
        failure = self._proof.first_failure(plan)
        while failure is not None and parts:
            spoiling = next(
                (k for k in range(len(parts)) if self._proof.first_failure(self._plan([parts[k]])) is not None),
                len(parts) - 1,
            )
            part = parts.pop(spoiling)
            self._keep(list(part.placements), failure)
            plan = self._plan(parts)
            failure = self._proof.first_failure(plan)
        return self._whole(failure) if failure is not None else plan

    def _plan(self, parts: list[Part], rules: dict[Site, Rule] | None = None) -> UnitPlan:
        placements: dict[str, Placement] = {fqn: Replicated() for fqn, _ in self._unit.named_parameters()}
        placements |= {fqn: Replicated() for fqn, _ in self._unit.named_buffers()}
        attributes: dict[str, dict[str, int]] = {}
        merged: dict[Site, Rule] = {}
        for part in parts:
            placements |= {fqn: placement for fqn, placement in part.placements.items() if fqn in placements}
            for fqn, values in part.attributes.items():
                attributes.setdefault(fqn, {}).update(values)
            merged |= part.rules
        roles = {fqn: role for part in parts for fqn, role in part.roles().items()}
        linears = {fqn: linear for fqn, linear in self._found.linears.items() if fqn in roles}
        cut = {fqn for fqn, placement in placements.items() if isinstance(placement, Shard)}
        repeated = [fqn for fqn, p in placements.items() if isinstance(p, Shard) and p.is_repeated(self._size)]
        watched = any(part.watched for part in parts)
        leaves = self._proof.example.leaves
        quiet = frozenset(k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return UnitPlan(
            size=self._size,
            groups=tuple(part.group for part in parts),
            roles=roles,
            linears=linears,
            placements=placements,
            shared_pieces=tuple(sorted(repeated)),
            summed=tuple(sorted({fqn for part in parts for fqn in part.summed} - cut)),
            attributes=attributes,
            rules=merged if rules is None else rules,
            offsets=frozenset(fqn for part in parts if part.offsets for fqn in part.group.columns),
            outputs={place: dim for part in parts for place, dim in part.outputs.items()},
            watched=watched,
            quiet=quiet,
            kept={fqn: self._reason(fqn, roles) for fqn, _ in self._unit.named_parameters() if fqn not in cut},
        )

    def _reason(self, fqn: str, roles: Mapping[str, Role]) -> str:
        """Why a parameter is whole on every rank."""
        if fqn in self._reasons:
            return self._reasons[fqn]
        owner = fqn.rpartition(".")[0]
        is_bias = roles.get(owner) == "row" or roles.get(owner.rpartition(".")[0]) == "attention"
        return "added to the sum over ranks" if is_bias else "no weight of a linear"

    def _whole(self, reason: str) -> UnitPlan:
        return UnitPlan.whole(self._user_unit, self._size, reason)


def _part(columns: tuple[str, ...], rows: tuple[str, ...], variant: Variant) -> Part:
    group = Group("column", columns, rows, variant.how)
    return Part(group, dict(variant.placements), variant.attributes, variant.offsets)


def _fits(unit: nn.Module, fqn: str, placement: Placement) -> bool:
    return not isinstance(placement, Shard) or unit.get_parameter(fqn).shape[placement.dim] == placement.length


def _is_size(site: Site, rule: Rule) -> bool:
    """Whether a rule rewrites a size or an offset; the others are about values or groups."""
    return site[1] == "view" or rule in (("expand",), ("offsets",))
