"""The search over groups of linears that are sharded together: trials of the variants of each, a proof of all."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.params.placement import Placement, Shard
from lightning_hybrid.tensor.plan import FOUND, NOT_A_MULTIPLE, ONE_TENSOR_RANK, Group, UnitPlan
from lightning_hybrid.tensor.proof.proof import Proof
from lightning_hybrid.tensor.runtime.attention import attention_placements
from lightning_hybrid.tensor.search.dataflow import LinearDataflow, Pair, trace_linears
from lightning_hybrid.tensor.search.groups import GroupPlan, GroupTrials
from lightning_hybrid.tensor.search.requests import Request, UnitRequests, UnitTask
from lightning_hybrid.tensor.search.sequence import find_sequence, plan_sequence
from lightning_hybrid.tensor.search.variants import heads_of, uneven_sizes, variants

# A lone linear with less than this share of the unit's parameters is not worth a gather.
_SMALL_SHARE = 0.01
# Once a variant is found that needs `RegionMode`: how many more are tried for one that does not.
_EXTRA_TRIALS = 6


class GroupSearch(GroupTrials):
    """Searches how the linears of one unit are sharded over some ranks.

    Attributes:
        groups: The groups of the plan that was found.
        proof_failed: Whether groups that had passed their trials were not proved together.
    """

    def __init__(
        self,
        task: UnitTask,
        proof: Proof,
        dataflow: LinearDataflow | None = None,
        stored: Mapping[str, Placement] | None = None,
        check_gradients: bool = False,
    ) -> None:
        """Binds the search to a unit and to the ranks of its proof, which may be others than the task's.

        ``dataflow`` is that of the unit, if known, and ``stored`` the placements over tensor ranks, for exchanges of
        positions. With ``check_gradients`` trials compare gradients too; the proof always does.
        """
        self._dataflow = dataflow or trace_linears(proof.unit, proof.run_unit)
        super().__init__(task, proof, self._dataflow.linears, stored, check_gradients)
        self.groups: list[GroupPlan] = []
        self.proof_failed = self._only_with_heads = False
        self._requests, self._unit, self._ranks, self._size = task.requests, proof.unit, proof.ranks, proof.ranks.size
        self._unpaired: dict[str, str] = {}  # of linears in no pair
        self._uneven: dict[str, tuple[int, str]] = {}
        self._notes: list[str] = []

    def over_all_ranks(self, proof: Proof, placements: Mapping[str, Placement]) -> GroupSearch:
        """Makes a search on all ranks of `proof`, for parameters with these placements on tensor ranks."""
        return GroupSearch(replace(self._task, requests=UnitRequests()), proof, self._dataflow, placements)

    def with_gradients(self) -> GroupSearch:
        """Makes the same search with trials that compare gradients too."""
        return GroupSearch(self._task, self._proof, self._dataflow, check_gradients=True)

    def run(self) -> UnitPlan:
        """Searches a plan, and proves it."""
        if self._size == 1:
            return self._task.unsharded(ONE_TENSOR_RANK)
        groups = self.groups = [*self._vocabulary_groups(), *self._attention_groups(), *self._linear_pairs()]
        groups += self._gathered_linears({fqn for group in groups for fqn in group.roles()})
        plan = self._prove(groups)
        # Vocabulary-parallel lookups and products need all positions.
        by = self._task.sequence_parallel if self._task.context == 1 else None
        if by is not None and plan.num_sharded and not plan.vocabulary:
            shard = partial(plan_sequence, self._unit, plan, self._proof, by, sequence=find_sequence(self._proof))
            guessed = shard(guess=True, prove=False)
            is_right = guessed.full_sequence_reason or self._proof.first_failure(guessed) is None
            plan = guessed if is_right else shard(guess=False)
        return replace(plan, num_trials=self._ranks.num_trials)

    def exchanged(self, groups: list[GroupPlan] | None, *, with_heads: bool) -> tuple[list[GroupPlan], str]:
        """Shards groups that are sharded over fewer ranks, or all that are found; returns them, and why others fail."""
        self._only_with_heads = with_heads
        attentions = self._attention_groups()
        if groups is None:
            return [*attentions, *self._linear_pairs()], ""
        found: list[GroupPlan] = []
        failures = []
        for group in groups:
            columns, rows = group.group.columns, group.group.rows
            other: GroupPlan | str
            if group.group.role == "column" and self._is_candidate((columns, rows)):
                other = self._uneven_heads(columns) or self._best_variant((columns, rows), group.group.origin)
            elif group.group.role == "attention":
                reason = next((self.reasons[name] for name in group.placements if name in self.reasons), "")
                other = next((other for other in attentions if other.group.columns == columns), reason)
            else:
                continue
            if isinstance(other, str):
                failures.append(f"{other} (tensor ranks times context ranks)")
            else:
                found.append(other)
        return found, "; ".join(failures)

    def _is_candidate(self, pair: Pair) -> bool:
        return not self._only_with_heads or self._max_heads(pair[0])[0] > 1

    def _max_heads(self, columns: tuple[str, ...]) -> tuple[int, str]:
        """The largest number of heads as which the output of one of these is viewed, and its FQN; 1 if none is."""
        seen = {fqn: self._dataflow.arrangements[fqn].pieces(self.linears[fqn].num_out)[1] for fqn in columns}
        return max((count or 1, fqn) for fqn, counts in seen.items() for count in counts)

    def _uneven_heads(self, columns: tuple[str, ...]) -> str:
        """Why positions cannot be exchanged for heads after these; fewer key heads than ranks can be repeated."""
        heads, fqn = self._max_heads(columns)
        fits = heads == 1 or heads % self._size == 0
        return "" if fits else f"{heads} heads of {fqn} are {NOT_A_MULTIPLE} {self._size} ranks"

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _vocabulary_groups(self) -> list[GroupPlan]:
        """Vocabulary-parallel weights of embeddings and heads; they are in no pair of linears."""
        groups: list[GroupPlan] = []
        lengths = {name: self._unit.get_parameter(name).shape[dim] for name, dim in self._task.vocabulary.items()}
        for length in sorted(set(lengths.values())):
            dims = {name: dim for name, dim in self._task.vocabulary.items() if lengths[name] == length}
            shards = {name: Shard.unevenly(dim, length, self._size) for name, dim in dims.items()}
            rows = next(iter(shards.values())).local_length
            group = Group("vocabulary", tuple(dims), (), f"by vocabulary, {rows} of {length} rows on a rank")
            found = self.try_group(GroupPlan(group, {**shards}, vocabulary=dims))
            if self._ranks.first_unit is not None and self._ranks.first_unit.num_gathers and not isinstance(found, str):
                found = "the unit uses it in an operation without a vocabulary-parallel form"
            if accepted := self._accepted(found, list(dims)):
                groups += accepted
                self.excluded |= dict.fromkeys(dims, "sharded by its vocabulary")
        return groups

    def _attention_groups(self) -> list[GroupPlan]:
        groups: list[GroupPlan] = []
        for fqn in self._dataflow.attentions:
            module = self._unit.get_submodule(fqn)
            assert isinstance(module, nn.MultiheadAttention)
            names = [f"{fqn}.{name}" if fqn else name for name, _ in module.named_parameters()]
            if module.num_heads % self._size:
                self._replicate(names, f"{module.num_heads} heads are {NOT_A_MULTIPLE} {self._size} ranks")
                self._uneven[fqn] = module.num_heads, "heads"
                continue
            group = Group("attention", (fqn,), how=f"attention split by heads over {self._size} ranks")
            found = self.try_group(GroupPlan(group, attention_placements(fqn, module, self._size)))
            groups += self._accepted(found, names)
        return groups

    def _linear_pairs(self) -> list[GroupPlan]:
        """The user's pairs, the model's own plan, and further pairs that are found."""
        by_user, by_model = self._requests.by_user, self._requests.by_model
        assigned = set(by_user)
        groups: list[GroupPlan] = []
        pairs, problems = requested_pairs(self._dataflow, by_user)
        for fqn, problem in problems.items():
            name = self._requests.named(fqn)
            raise TensorPlanError(f"tensor_parallel_plan has {by_user[fqn].entry}: {name} {problem}", entry="plan-pair")
        for pair in pairs:
            group = self._best_variant(pair, "your plan")
            if isinstance(group, str):
                raise self._refused(pair, group)
            groups.append(group)
            assigned |= group.roles().keys()
        pairs, problems = requested_pairs(self._dataflow, by_model, assigned)
        for fqn, problem in problems.items():
            self._notes.append(f"the model's own plan is not followed: {fqn} {problem.partition(';')[0]}")
        tried: dict[Pair, GroupPlan | str] = {}
        for pair in pairs:
            group = self._best_variant(pair, "the model's own plan")
            if isinstance(group, str):
                tried[pair] = group
                self._notes.append(f"the model's own plan is not followed: {_pair_text(pair)}: {group}")
            else:
                groups.append(group)
                assigned |= group.roles().keys()
        groups += self._found_pairs(assigned, tried)
        order = list(self.linears)
        return sorted(groups, key=lambda group: order.index(group.group.rows[0]))

    def _found_pairs(self, assigned: set[str], tried: dict[Pair, GroupPlan | str]) -> list[GroupPlan]:
        """Pairs from the dataflow; where one is wrong, its last row is no row, and pairs are searched again."""
        no_rows: set[str] = set()
        uneven: dict[str, tuple[int, str]] | None = None
        while True:
            pairs = [pair for pair in self._dataflow.candidates(assigned, no_rows) if self._is_candidate(pair)]
            for pair in pairs:
                if pair not in tried:
                    tried[pair] = self._best_variant(pair, FOUND)
            # Later pairs are not what the author of the unit intended: their sizes need not divide.
            uneven = dict(self._uneven) if uneven is None else uneven
            self._uneven = dict(uneven)
            found = [tried[pair] for pair in pairs]
            wrong = {pair: reason for pair, reason in zip(pairs, found, strict=True) if isinstance(reason, str)}
            if not wrong:
                return [group for group in found if not isinstance(group, str)]
            for pair, reason in wrong.items():
                self._unpaired |= {fqn: reason for side in pair for fqn in side if fqn not in self._unpaired}
            no_rows.add(next(iter(wrong))[1][-1])

    def _best_variant(self, pair: Pair, origin: str) -> GroupPlan | str:
        """The best variant of a pair that passes its trial, or what is wrong."""
        best: GroupPlan | None = None
        more, num_wrong = _EXTRA_TRIALS, 0
        least_wrong = math.inf, "its sizes cannot be divided"
        for candidate in variants(self._unit, self._dataflow, pair, self._size, origin):
            if best is not None and (not best.avoidable or not more):
                break
            more -= best is not None
            group = self.try_group(candidate)
            if isinstance(group, str):
                error, num_wrong = self._proof.relative_error, num_wrong + 1
                if num_wrong == 1 or error < least_wrong[0]:
                    least_wrong = error, f"{group} ({candidate.group.how}"
            elif best is None or not group.watched:
                best = group
        if best is not None:
            return best
        uneven = uneven_sizes(self._dataflow, *pair, self._size)
        if uneven:
            self._uneven |= uneven
            return f"{_sizes_text(uneven)} are {NOT_A_MULTIPLE} {self._size} ranks"
        if set(heads_of(self._dataflow, pair[0])) == {1}:
            return f"attention with 1 head is not split over {self._size} ranks"
        tried = f", the best of {num_wrong} variants)" if num_wrong > 1 else ")"
        return least_wrong[1] + tried * (num_wrong > 0)

    def _refused(self, pair: Pair, reason: str) -> TensorPlanError:
        by_user = self._requests.by_user
        entries = "; ".join(dict.fromkeys(by_user[fqn].entry for side in pair for fqn in side if fqn in by_user))
        return TensorPlanError(
            f"tensor_parallel_plan has {entries}, but {_pair_text(pair)} of {self._requests.unit or 'the unit'} sharded"
            f" like that is not proved: {reason}; leave these out of the plan, so that another one is searched, or make"
            " them replicated",
            entry="plan-proof",
        )

    def _gathered_linears(self, assigned: set[str]) -> list[GroupPlan]:
        """Linears in no pair, column-parallel with their outputs gathered."""
        by_user, by_model = self._requests.by_user, self._requests.by_model
        total = sum(p.numel() for p in self._task.unit.parameters())
        groups: list[GroupPlan] = []
        for fqn, linear in self.linears.items():
            if fqn in assigned:
                continue
            names = [linear.parameter(name) for name in ("weight", "bias")[: 1 + linear.has_bias]]
            numel = sum(self._task.unit.get_parameter(name).numel() for name in names)
            is_small = numel < _SMALL_SHARE * total and fqn not in by_user
            if NOT_A_MULTIPLE in self._unpaired.get(fqn, "") and linear.num_out % self._size:
                self._replicate(names, self._unpaired[fqn])
            elif is_small:
                self._replicate(names, "too small to be worth a gather")
            elif linear.num_out < self._size:
                self._replicate(names, f"{linear.num_out} output features for {self._size} ranks")
            elif linear.num_out % self._size:
                self._uneven[fqn] = linear.num_out, "output features"
                self._replicate(names, f"{linear.num_out} output features are {NOT_A_MULTIPLE} {self._size} ranks")
            else:
                dims = dict(zip(names, (linear.out_dim, 0), strict=False))
                shards: dict[str, Placement] = {
                    name: Shard.evenly(dim, linear.num_out, self._size) for name, dim in dims.items()
                }
                plans = ("your plan", by_user), ("the model's own plan", by_model)
                requested = [name for name, plan in plans if fqn in plan and plan[fqn].wanted == "gathered"]
                how = "output gathered" if requested else f"output gathered: {self._why_unpaired(fqn)}"
                group = Group("gathered", (fqn,), (), how, (*requested, FOUND)[0])
                groups += self._accepted(self.try_group(GroupPlan(group, shards)), names)
        return groups

    def _why_unpaired(self, fqn: str) -> str:
        if fqn in self._unpaired:
            return self._unpaired[fqn]
        readers = [reader for reader, sources in self._dataflow.sources.items() if fqn in sources]
        others = [reader for reader in readers if reader in self._requests.by_user]
        in_plan = f"what reads it ({', '.join(others)}) is in your plan"
        return in_plan if others else "no other layer can be split with it"

    def _accepted(self, found: GroupPlan | str, fqns: list[str]) -> list[GroupPlan]:
        """The group that passed its trial; none, and parameters that stay replicated, where it did not."""
        if isinstance(found, GroupPlan):
            return [found]
        self._replicate(fqns, found)
        return []

    def _replicate(self, fqns: list[str], reason: str) -> None:
        for fqn in fqns:
            self.reasons.setdefault(fqn, reason)

    def _prove(self, groups: list[GroupPlan]) -> UnitPlan:
        """Proves all groups together, in every setting; groups that make the proof fail are dropped."""
        plan = self.plan(groups)
        failure = self._proof.first_failure(plan)
        self.proof_failed = failure is not None
        while failure is not None and groups:
            failures = (self._proof.first_failure(self.plan([group])) for group in groups)
            failing = next((k for k, other in enumerate(failures) if other is not None), len(groups) - 1)
            group = groups.pop(failing)
            self._replicate(list(group.placements), failure)
            plan = self.plan(groups)
            failure = self._proof.first_failure(plan)
        if failure is not None:
            plan = self._task.unsharded(failure)
        return replace(plan, uneven=self._uneven, notes=tuple(self._notes))


def _pair_text(pair: Pair) -> str:
    columns, rows = pair
    return ", ".join(columns) + (f" -> {', '.join(rows)}" if rows else "")


def _sizes_text(uneven: Mapping[str, tuple[int, str]]) -> str:
    owners: dict[tuple[int, str], list[str]] = {}
    for fqn, size in uneven.items():
        owners.setdefault(size, []).append(fqn or "it")
    return " and ".join(f"{count} {what} of {', '.join(fqns)}" for (count, what), fqns in owners.items())


def requested_pairs(
    dataflow: LinearDataflow, plan_requests: Mapping[str, Request], assigned: Collection[str] = ()
) -> tuple[list[Pair], dict[str, str]]:
    """Finds the pairs that a plan requests, with the linears that it does not name and they need.

    The second result is what is wrong with linears that fit no pair, by FQN.
    """
    order = list(dataflow.linears)
    free = [fqn for fqn in order if fqn not in assigned]

    def wanted(fqn: str) -> str | None:
        return plan_requests[fqn].wanted if fqn in plan_requests else None

    def entries(fqns: list[str]) -> str:
        words = [f"{fqn} ({plan_requests[fqn].entry})" if fqn in plan_requests else fqn for fqn in fqns]
        return ", ".join(words) or "no linear of its layer"

    problems: dict[str, str] = {}
    rows = [fqn for fqn in free if wanted(fqn) == "row"]
    for column in [fqn for fqn in free if wanted(fqn) == "column"]:
        readers = [fqn for fqn in order if column in dataflow.sources[fqn]]
        if not readers or any(r not in free or wanted(r) not in (None, "row") for r in readers):
            problems[column] = (
                f"is colwise, but its output is read by {entries(readers)}; make what reads it rowwise, or make it"
                " colwise_gather_output"
            )
        else:
            rows += [fqn for fqn in readers if fqn not in rows]
    groups: list[tuple[set[str], list[str]]] = []
    used: set[str] = set()
    for row in rows:  # grows
        columns = {c for c in dataflow.sources[row] if c in free and wanted(c) in (None, "column")} - {*rows, *problems}
        if not columns:
            problems[row] = (
                f"is rowwise, but no colwise linear feeds it: its input comes from"
                f" {entries(sorted(dataflow.sources[row], key=order.index))}; make what feeds it colwise, or make it"
                " colwise_gather_output or replicated"
            )
            continue
        # A linear that reads a sharded value must be a row too.
        used |= columns
        rows += [r for r in free if dataflow.sources[r] & columns and wanted(r) is None and r not in {*rows, *used}]
        joined = [group for group in groups if group[0] & columns]
        groups = [group for group in groups if group not in joined]
        groups.append(
            (columns.union(*(group[0] for group in joined)), [*(r for group in joined for r in group[1]), row])
        )
    pairs = [
        (tuple(sorted(columns, key=order.index)), tuple(sorted(together, key=order.index)))
        for columns, together in groups
    ]
    return sorted(pairs, key=lambda pair: order.index(pair[1][0])), problems
