"""The search over groups of linears that are cut together: variants of each, proofs of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from lightning_hybrid.parts.placement import Placement, Shard
from lightning_hybrid.tensor.discovery.linear_dataflow import Discovery, Pair, discover
from lightning_hybrid.tensor.plan.unit_plan import NOT_A_MULTIPLE, Deal, Group, LinearLike, UnitPlan
from lightning_hybrid.tensor.requests.precedence import Origin, Wishes, wished_pairs
from lightning_hybrid.tensor.requests.user_plan import TensorPlanError
from lightning_hybrid.tensor.runtime.parallel_attention import attention_placements
from lightning_hybrid.tensor.search.context_search import HELD_WHOLE
from lightning_hybrid.tensor.search.group_plan import Part
from lightning_hybrid.tensor.search.group_trials import AtRest, PartTrials
from lightning_hybrid.tensor.search.plan_variants import uneven_sizes, variants
from lightning_hybrid.tensor.search.sequence_search import deal_positions, sequence_of
from lightning_hybrid.tensor.trial.equivalence_proof import Proof

# A lone linear with less than this share of the unit's parameters is not worth a gather.
_SMALL_SHARE = 0.01
# How many more variants are tried for one that needs no watch, once one is found that does.
_MORE_TRIALS = 6


class GroupSearch:
    """Finds how the linears of one unit are cut over some ranks.

    Attributes:
        parts: The groups of the plan that was found.
        reasons: Why parameters stay whole.
        spoiled: Whether something that had passed its trial was not proved.
    """

    def __init__(
        self,
        unit: nn.Module,
        proof: Proof,
        kept: Mapping[str, str],
        wishes: Wishes,
        deal: Deal,
        vocabulary: Mapping[str, int],
        found: Discovery | None = None,
        at_rest: AtRest | None = None,
        careful: bool = False,
    ) -> None:
        """Say what is searched.

        Args:
            unit: As for ``plan_unit``; so are wishes, deal and vocabulary.
            proof: On the ranks.
            kept: What stays whole.
            wishes: See there.
            deal: See there.
            vocabulary: See there.
            found: What a run showed.
            at_rest: For an exchange of positions: how parameters lie on fewer ranks.
            careful: Whether trials look at gradients too; the proof does so always.
        """
        self.parts: list[Part] = []
        self.spoiled = False
        self._user_unit, self._asked, self._wishes, self._deal = unit, kept, wishes, deal
        self._vocabulary, self._with_heads = vocabulary, False
        self._proof, self._unit, self._ranks, self._size = proof, proof.unit, proof.ranks, proof.ranks.size
        self._found = discover(proof.unit, proof.run_unit) if found is None else found
        self.reasons: dict[str, str] = dict(kept)
        self._trials = PartTrials(proof, self._found.linears, self.reasons, dict(kept), at_rest, careful=careful)
        self._unpaired: dict[str, str] = {}  # why linears are in no pair
        self._uneven: dict[str, tuple[int, str]] = {}
        self._notes: list[str] = []

    @property
    def linears(self) -> Mapping[str, LinearLike]:
        """All linears that ran."""
        return self._found.linears

    @property
    def num_trials(self) -> int:
        """How often the unit was run sharded."""
        return self._ranks.num_trials

    def over_more(self, proof: Proof, placements: Mapping[str, Placement], size: int, context: int) -> GroupSearch:
        """A search of the same unit over tensor ranks times context ranks, of which parameters lie on the former.

        Args:
            proof: Of the unit on so many ranks.
            placements: Of parameters over tensor ranks.
            size: Number of tensor ranks.
            context: Number of context ranks.
        """
        at_rest = AtRest(placements, size, context)
        return GroupSearch(self._user_unit, proof, self._asked, Wishes(), None, {}, found=self._found, at_rest=at_rest)

    def carefully(self) -> GroupSearch:
        """The same search, whose trials look at gradients too."""
        given = self._user_unit, self._proof, self._asked, self._wishes, self._deal, self._vocabulary
        return GroupSearch(*given, found=self._found, careful=True)

    def run(self) -> UnitPlan:
        """Find a plan."""
        if self._size == 1:
            return self._whole(HELD_WHOLE)
        parts = self.parts = [*self._by_vocabulary(), *self._attentions(), *self._pairs()]
        parts += self._gathered({fqn for part in parts for fqn in part.roles()})
        plan = self._prove(parts)
        # Ranks that look up or multiply by their rows need all positions.
        if self._deal is not None and plan.num_sharded and not plan.vocabulary:
            dealt = partial(
                deal_positions, self._unit, plan, self._proof, self._deal, sequence=sequence_of(self._proof)
            )
            guessed = dealt(guess=True, prove=False)
            is_right = guessed.undealt or self._proof.first_failure(guessed) is None
            plan = guessed if is_right else dealt(guess=False)
        return replace(plan, num_trials=self._ranks.num_trials)

    def exchanged(self, parts: list[Part] | None, *, with_heads: bool) -> tuple[list[Part], str]:
        """What can be cut over the ranks of this search of what is cut over fewer, and why the rest cannot.

        Args:
            parts: Over fewer ranks; None for whatever there is.
            with_heads: Only what is seen to have heads.
        """
        self._with_heads = with_heads
        attentions = self._attentions()
        if parts is None:
            return [*attentions, *self._pairs()], ""
        found: list[Part] = []
        failures = []
        for part in parts:
            columns, rows = part.group.columns, part.group.rows
            if part.group.role == "column" and self._is_considered((columns, rows)):
                reason = self._too_few_heads(columns)
                other, reason = (None, reason) if reason else self._best((columns, rows), part.group.origin)
            elif part.group.role == "attention":
                other = next((other for other in attentions if other.group.columns == columns), None)
                reason = next((self.reasons[name] for name in part.placements if name in self.reasons), "")
            else:
                continue
            found += [] if other is None else [other]
            failures += [f"{reason} (tensor ranks times context ranks)"] if other is None else []
        return found, "; ".join(failures)

    def _is_considered(self, pair: Pair) -> bool:
        return not self._with_heads or self._most_heads(pair[0])[0] > 1

    def _most_heads(self, columns: tuple[str, ...]) -> tuple[int, str]:
        """The largest number of heads as which the output of one of these is seen, and of which; 1 if of none."""
        seen = {fqn: self._found.arrangements[fqn].pieces(self._found.linears[fqn].num_out)[1] for fqn in columns}
        return max((count or 1, fqn) for fqn, counts in seen.items() for count in counts)

    def _too_few_heads(self, columns: tuple[str, ...]) -> str:
        """Why positions cannot be exchanged for heads behind these; key heads fewer than ranks can be repeated."""
        heads, fqn = self._most_heads(columns)
        return (
            f"{heads} heads of {fqn} are {NOT_A_MULTIPLE} {self._size} ranks"
            if heads > 1 and heads % self._size
            else ""
        )

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _by_vocabulary(self) -> list[Part]:
        """Weights of embeddings and heads; what pairs with others is not looked for among them."""
        parts = []
        lengths = {name: self._unit.get_parameter(name).shape[dim] for name, dim in self._vocabulary.items()}
        for length in sorted(set(lengths.values())):
            dims = {name: dim for name, dim in self._vocabulary.items() if lengths[name] == length}
            cuts = {name: Shard.unevenly(dim, length, self._size) for name, dim in dims.items()}
            rows = next(iter(cuts.values())).local_length
            group = Group("vocabulary", tuple(dims), (), f"by vocabulary, {rows} of {length} rows on a rank", "found")
            part, reason = self._trials.tried(Part(group, {**cuts}, vocabulary=dims))
            if part is not None and self._ranks.num_gathers:
                part, reason = None, "the unit does with it what cannot be done in parts"
            if part is not None:
                parts.append(part)
                self._trials.kept |= dict.fromkeys(dims, "cut by its vocabulary")
            else:
                self._keep(list(dims), reason)
        return parts

    def _attentions(self) -> list[Part]:
        parts = []
        for fqn in self._found.attentions:
            module = self._unit.get_submodule(fqn)
            assert isinstance(module, nn.MultiheadAttention)
            if module.num_heads % self._size:
                self._keep(
                    [f"{fqn}.{name}" if fqn else name for name, _ in module.named_parameters()],
                    f"{module.num_heads} heads are {NOT_A_MULTIPLE} {self._size} ranks",
                )
                self._uneven[fqn] = module.num_heads, "heads"
                continue
            group = Group("attention", (fqn,), how="by heads")
            part, reason = self._trials.tried(Part(group, attention_placements(fqn, module, self._size)))
            if part is not None:
                parts.append(part)
            else:
                self._keep([f"{fqn}.{name}" if fqn else name for name, _ in module.named_parameters()], reason)
        return parts

    def _pairs(self) -> list[Part]:
        """The user's pairs, those of the model's own plan, and what else is found."""
        yours, own = self._wishes.yours, self._wishes.own
        taken = set(yours)
        parts: list[Part] = []
        pairs, problems = wished_pairs(self._found, yours)
        for fqn, problem in problems.items():
            raise TensorPlanError(f"tensor_parallel_plan has {yours[fqn].said}: {self._wishes.named(fqn)} {problem}")
        for pair in pairs:
            part, reason = self._best(pair, "your plan")
            if part is None:
                raise self._refused(pair, reason)
            parts.append(part)
            taken |= part.roles().keys()
        pairs, problems = wished_pairs(self._found, own, taken)
        for fqn, problem in problems.items():
            self._notes.append(f"the model's own plan is not followed: {fqn} {problem.partition(';')[0]}")
        tried: dict[Pair, tuple[Part | None, str]] = {}
        for pair in pairs:
            part, reason = self._best(pair, "the model's own plan")
            if part is not None:
                parts.append(part)
                taken |= part.roles().keys()
            else:
                tried[pair] = None, reason
                self._notes.append(f"the model's own plan is not followed: {_words(pair)}: {reason}")
        parts += self._found_pairs(taken, tried)
        order = list(self._found.linears)
        return sorted(parts, key=lambda part: order.index(part.group.rows[0]))

    def _found_pairs(self, taken: set[str], tried: dict[Pair, tuple[Part | None, str]]) -> list[Part]:
        """What pairs by itself; where that is wrong the row is none, and what it stood in the way of is tried."""
        no_rows: set[str] = set()
        uneven: dict[str, tuple[int, str]] | None = None
        while True:
            pairs = [pair for pair in self._found.candidates(taken, no_rows) if self._is_considered(pair)]
            for pair in pairs:
                if pair not in tried:
                    tried[pair] = self._best(pair, "found")
            # What is tried later was not meant by whoever wrote the unit: its sizes need not divide.
            uneven = dict(self._uneven) if uneven is None else uneven
            self._uneven = dict(uneven)
            wrong = [pair for pair in pairs if tried[pair][0] is None]
            if not wrong:
                return [part for pair in pairs if (part := tried[pair][0]) is not None]
            for pair in wrong:
                reason = tried[pair][1]
                self._unpaired |= {fqn: reason for side in pair for fqn in side if fqn not in self._unpaired}
            no_rows.add(wrong[0][1][-1])

    def _best(self, pair: Pair, origin: Origin | str) -> tuple[Part | None, str]:
        """The best variant of a pair that is right, or None and what is wrong."""
        best: Part | None = None
        more, num_wrong = _MORE_TRIALS, 0
        least_wrong = math.inf, "its sizes cannot be divided"
        for variant in variants(self._unit, self._found, *pair, self._size):
            if best is not None and (not best.avoidable or not more):
                break
            more -= best is not None
            part, failure = self._trials.tried(Part.of_pair(*pair, variant, origin))
            if part is not None and (best is None or not part.watched):
                best = part
            if part is None:
                error, num_wrong = self._proof.relative_error, num_wrong + 1
                if num_wrong == 1 or error < least_wrong[0]:
                    least_wrong = error, f"{failure} (cut {variant.how}"
        if best is not None:
            return best, ""
        uneven = uneven_sizes(self._found, *pair, self._size)
        if uneven:
            self._uneven |= uneven
            return None, f"{_listed(uneven)} are {NOT_A_MULTIPLE} {self._size} ranks"
        tried = f", the best of {num_wrong} ways)" if num_wrong > 1 else ")"
        return None, least_wrong[1] + tried * (num_wrong > 0)

    def _refused(self, pair: Pair, reason: str) -> TensorPlanError:
        said = "; ".join(
            dict.fromkeys(self._wishes.yours[f].said for side in pair for f in side if f in self._wishes.yours)
        )
        return TensorPlanError(
            f"tensor_parallel_plan has {said}, but {_words(pair)} of {self._wishes.unit or 'the unit'} cut like that is"
            f" not proved: {reason}; leave these out of the plan, so that another one is searched, or make them"
            " replicated"
        )

    def _gathered(self, taken: set[str]) -> list[Part]:
        """Linears that pair with no other, with their outputs gathered."""
        wishes = self._wishes
        total = sum(p.numel() for p in self._unit.parameters())
        parts = []
        for fqn, linear in self._found.linears.items():
            if fqn in taken:
                continue
            names = [linear.parameter(name) for name in ("weight", "bias")[: 1 + linear.has_bias]]
            numel = sum(self._unit.get_parameter(name).numel() for name in names)
            is_small = numel < _SMALL_SHARE * total and fqn not in wishes.yours
            if NOT_A_MULTIPLE in self._unpaired.get(fqn, "") and linear.num_out % self._size:
                self._keep(names, self._unpaired[fqn])
            elif is_small:
                self._keep(names, "too small to be worth a gather")
            elif linear.num_out < self._size:
                self._keep(names, f"{linear.num_out} output features for {self._size} ranks")
            elif linear.num_out % self._size:
                self._uneven[fqn] = linear.num_out, "output features"
                self._keep(names, f"{linear.num_out} output features are {NOT_A_MULTIPLE} {self._size} ranks")
            else:
                dims = dict(zip(names, (linear.out_dim, 0), strict=False))
                cuts: dict[str, Placement] = {
                    name: Shard.evenly(dim, linear.num_out, self._size) for name, dim in dims.items()
                }
                asked = [
                    name
                    for name, plan in (("your plan", wishes.yours), ("the model's own plan", wishes.own))
                    if fqn in plan and plan[fqn].wanted == "gathered"
                ]
                how = "output gathered" if asked else f"output gathered: {self._why_alone(fqn)}"
                group = Group("gathered", (fqn,), (), how, (*asked, "found")[0])
                part, reason = self._trials.tried(Part(group, cuts))
                if part is not None:
                    parts.append(part)
                else:
                    self._keep(names, reason)
        return parts

    def _why_alone(self, fqn: str) -> str:
        if fqn in self._unpaired:
            return self._unpaired[fqn]
        readers = [reader for reader, sources in self._found.sources.items() if fqn in sources]
        others = [reader for reader in readers if reader in self._wishes.yours]
        return f"what reads it ({', '.join(others)}) is in your plan" if others else "it pairs with no other linear"

    def _keep(self, fqns: list[str], reason: str) -> None:
        for fqn in fqns:
            self.reasons.setdefault(fqn, reason)

    def _prove(self, parts: list[Part]) -> UnitPlan:
        """All parts together, in every mode; without those that spoil it, if there are such."""
        plan = self._trials.plan(parts)
        failure = self._proof.first_failure(plan)
        self.spoiled = failure is not None
        while failure is not None and parts:
            spoiling = next(
                (k for k in range(len(parts)) if self._proof.first_failure(self._trials.plan([parts[k]])) is not None),
                len(parts) - 1,
            )
            part = parts.pop(spoiling)
            self._keep(list(part.placements), failure)
            plan = self._trials.plan(parts)
            failure = self._proof.first_failure(plan)
        if failure is not None:
            plan = self._whole(failure)
        return replace(plan, uneven=self._uneven, notes=tuple(self._notes))

    def _whole(self, reason: str) -> UnitPlan:
        return UnitPlan.whole(self._user_unit, self._size, reason)


def _words(pair: Pair) -> str:
    columns, rows = pair
    return ", ".join(columns) + (f" -> {', '.join(rows)}" if rows else "")


def _listed(uneven: Mapping[str, tuple[int, str]]) -> str:
    """Sizes and what has them, in words."""
    holders: dict[tuple[int, str], list[str]] = {}
    for fqn, size in uneven.items():
        holders.setdefault(size, []).append(fqn or "it")
    return " and ".join(f"{count} {what} of {', '.join(fqns)}" for (count, what), fqns in holders.items())
