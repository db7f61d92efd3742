"""Variants of the plan of one group of linears, the likely ones first.

They differ in how the output features of a projection are arranged (one piece, several, split by heads), in which
integer attributes of the modules are divided, and in whether the code indexes the full projection with offsets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from lightning_hybrid.params.placement import Piece, Placement, Shard
from lightning_hybrid.tensor.plan import Group, LinearLike, Rule, Site, UnitPlan
from lightning_hybrid.tensor.proof.proof import Proof
from lightning_hybrid.tensor.search.context import stored_placements
from lightning_hybrid.tensor.search.dataflow import Arrangement, LinearDataflow, Pair
from lightning_hybrid.tensor.search.groups import GroupPlan, merged_plan
from lightning_hybrid.tensor.search.requests import UnitTask

Attributes = dict[str, dict[str, int]]


def variants(unit: nn.Module, dataflow: LinearDataflow, pair: Pair, size: int, origin: str) -> Iterator[GroupPlan]:
    """Yields all variants of a pair over some ranks, for the authority that has asked for it; each with its words."""
    columns, rows = pair
    column_linears = [dataflow.linears[fqn] for fqn in columns]
    seen: list[object] = []
    for row_placements, row_words in _row_placements([dataflow.linears[fqn] for fqn in rows], dataflow, size):
        for pieces, words in _column_pieces(column_linears, dataflow, size):
            placements = {**row_placements}
            for linear, cut in zip(column_linears, pieces, strict=True):
                placements[linear.parameter("weight")] = Shard(linear.out_dim, cut)
                if linear.has_bias:
                    placements[linear.parameter("bias")] = Shard(0, cut)
            fused = any(len(cut) > 1 for cut in pieces)
            numbers = _local_numbers(column_linears, dataflow.arrangements, pieces, size)
            for attributes, which in _attributes(unit, columns, rows, numbers):
                for offsets in (False, True) if fused else (False,):
                    key = (placements, attributes, offsets)
                    if key not in seen:
                        seen.append(key)
                        texts = [words, row_words, which, "offsets divided" if offsets else ""]
                        how = ", ".join(text for text in texts if text)
                        yield GroupPlan(Group("column", *pair, how, origin), dict(placements), attributes, offsets)


def uneven_sizes(
    dataflow: LinearDataflow, columns: tuple[str, ...], rows: tuple[str, ...], size: int
) -> dict[str, tuple[int, str]]:
    """Finds sizes of a group that the number of ranks does not divide: FQN -> size, and what it counts; heads first."""
    uneven = {}
    for fqn in columns:
        _, seen = dataflow.arrangements[fqn].pieces(dataflow.linears[fqn].num_out)
        # Fewer heads than ranks are repeated.
        heads = [count for count in seen if count is not None and count > 1 and count % size and size % count]
        if heads:
            uneven[fqn] = heads[0], "heads"
    if uneven:
        return uneven
    sides = [(columns, "num_out", "output features"), (rows, "num_in", "input features")]
    lengths = [(fqn, getattr(dataflow.linears[fqn], name), what) for fqns, name, what in sides for fqn in fqns]
    return {fqn: (length, what) for fqn, length, what in lengths if length % size}


def _row_placements(
    rows: list[LinearLike], dataflow: LinearDataflow, size: int
) -> Iterator[tuple[dict[str, Placement], str]]:
    """Placements of input features: in one piece, or in the pieces that the input was concatenated from."""
    joined = [dataflow.arrangements[linear.fqn].joined for linear in rows]
    for lengths in ([(linear.num_in,) for linear in rows], joined):
        placements: dict[str, Placement] = {}
        for linear, cuts in zip(rows, lengths, strict=True):
            if sum(cuts) == linear.num_in and not any(length % size for length in cuts):
                cut = tuple(Piece(length, size) for length in cuts)
                placements[linear.parameter("weight")] = Shard(linear.in_dim, cut)
        if len(placements) == len(rows):
            yield placements, "" if lengths is not joined else "inputs in pieces"
        if not any(len(cuts) > 1 for cuts in joined):
            return


def _column_pieces(
    linears: list[LinearLike], dataflow: LinearDataflow, size: int
) -> Iterator[tuple[list[tuple[Piece, ...]], str]]:
    """Pieces for each column: as the code used them in the run, then one, three and two equal ones."""
    used = [dataflow.arrangements[linear.fqn].pieces(linear.num_out) for linear in linears]
    in_run = [local_pieces(lengths, heads, size) for lengths, heads in used]
    if all(cut is not None for cut in in_run):
        most = max(len(cut) for cut in in_run if cut is not None)
        yield [cut for cut in in_run if cut is not None], "by output features" if most == 1 else f"in {most} pieces"
    for count in (1, 3, 2):
        if count > 1 and len(linears) > 1:
            continue  # a group of several linears is not fused
        cuts = [linear.num_out for linear in linears]
        if not any(length % (count * size) for length in cuts):
            words = "by output features" if count == 1 else f"in {count} pieces"
            yield [tuple(Piece(length // count, size) for _ in range(count)) for length in cuts], words


def _local_numbers(
    linears: list[LinearLike], arrangements: Mapping[str, Arrangement], pieces: list[tuple[Piece, ...]], size: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Maps numbers of heads, and widths, to one rank's."""
    heads: dict[int, int] = {}
    widths: dict[int, int] = {}
    for linear, cut in zip(linears, pieces, strict=True):
        _, seen = arrangements[linear.fqn].pieces(linear.num_out)
        for piece, num_heads in zip(cut, seen if len(seen) == len(cut) else [None] * len(cut), strict=True):
            widths[piece.length] = piece.local_length
            if num_heads is not None and num_heads > 1:
                heads[num_heads] = num_heads // piece.parts
        widths[linear.num_out] = sum(piece.local_length for piece in cut)
    most, least = max(heads, default=0), min(heads, default=0)
    if least and most % least == 0 and any(piece.parts < size for cut in pieces for piece in cut):
        # Query heads for each key head: fewer where key heads are repeated.
        heads.setdefault(most // least, heads[most] // heads[least])
    elif most and any(piece.parts == 1 for cut in pieces for piece in cut):
        heads.setdefault(most, most // size)
    return heads, widths


def _attributes(
    unit: nn.Module, columns: tuple[str, ...], rows: tuple[str, ...], numbers: tuple[dict[int, int], dict[int, int]]
) -> Iterator[tuple[Attributes, str]]:
    """Attributes to divide: none; those named after heads; those whose value is a number of heads; widths too.

    Where several have that value, one of them may be the width of a head, so each is also left as it is.
    """
    heads, widths = numbers
    owners = dict.fromkeys(fqn.rpartition(".")[0] for fqn in (*columns, *rows) if fqn)
    modules = {fqn: unit.get_submodule(fqn) for fqn in owners}

    def chosen(named: bool, numbers: Mapping[int, int]) -> Attributes:
        found: Attributes = {}
        for fqn, module in modules.items():
            for name, value in vars(module).items():
                if type(value) is int and value in numbers and numbers[value] != value:
                    if named and ("head" not in name or "dim" in name or "size" in name):
                        continue
                    found.setdefault(fqn, {})[name] = numbers[value]
        return found

    yield {}, ""
    if named := chosen(True, heads):
        yield named, "heads divided"
        wide = chosen(False, widths)
        yield (
            {fqn: {**wide.get(fqn, {}), **named.get(fqn, {})} for fqn in {**wide, **named}},
            "heads and widths divided",
        )
    if counted := chosen(False, heads):
        yield counted, "heads divided by value"
        for fqn, found in counted.items():
            for name in [name for name in found if _is_repeated(vars(modules[fqn]), name, found)]:
                kept = {key: value for key, value in found.items() if key != name}
                yield {**counted, fqn: kept}, f"heads divided by value, {name} is none"
    if wide := chosen(False, {**widths, **heads}):
        yield wide, "heads and widths divided by value"


def _is_repeated(members: Mapping[str, Any], name: str, names: Collection[str]) -> bool:
    """Whether another attribute among these has the same value."""
    return any(members[other] == members[name] for other in names if other != name)


def local_pieces(lengths: tuple[int, ...], heads: tuple[int | None, ...], size: int) -> tuple[Piece, ...] | None:
    """Pieces of a projection sharded by full heads; fewer heads than ranks are repeated; None if none fit."""
    pieces = []
    for length, num_heads in zip(lengths, heads, strict=True):
        if num_heads is None or num_heads % size == 0:
            parts = size
        elif size % num_heads == 0:
            parts = num_heads
        else:
            return None
        if length % parts:
            return None
        pieces.append(Piece(length, parts))
    return tuple(pieces)


class GroupTrials:
    """Runs trials of single groups of one unit.

    Attributes:
        linears: The linears that ran, by FQN.
        reasons: Why parameters stay replicated.
        excluded: Parameters that no group may have, each with the reason: replicated, or sharded in another way.
    """

    def __init__(
        self,
        task: UnitTask,
        proof: Proof,
        linears: Mapping[str, LinearLike],
        stored: Mapping[str, Placement] | None,
        check_gradients: bool,
    ) -> None:
        """Binds the trials to a proof; ``stored`` are the placements on tensor ranks, for exchanges of positions."""
        self._task, self._proof, self._stored, self._check_gradients = task, proof, stored, check_gradients
        self.linears, self.reasons, self.excluded = linears, dict(task.excluded), dict(task.excluded)

    def plan(self, groups: list[GroupPlan], rules: dict[Site, Rule] | None = None) -> UnitPlan:
        """Merges groups into a plan of the unit, as `merged_plan`."""
        proof = self._proof
        return merged_plan(proof.unit, proof.ranks.size, groups, self.linears, proof.example, self.reasons, rules)

    def _agrees_with_stored(self, placements: Mapping[str, Placement]) -> bool:
        """Whether placements over tensor ranks times context ranks only shard the stored shards further."""
        if self._stored is None or self._task.size == 1:
            return True
        reduced = stored_placements(placements, self._task.size, self._task.context)
        return not isinstance(reduced, str) and all(self._stored[fqn] == found for fqn, found in reduced.items())

    def try_group(self, group: GroupPlan) -> GroupPlan | str:
        """Tries one group by itself; returns it with the rules and sums that it needs, or what is wrong."""
        proof = self._proof
        proof.relative_error = math.inf
        if not group.fits(proof.unit):
            return "its sizes cannot be divided"
        if not self._agrees_with_stored(group.placements):
            return "it would need another sharding of the stored parameters"
        if excluded := self.excluded.keys() & group.placements.keys():
            return f"pairs with {min(excluded)}, {self.excluded[min(excluded)]}"
        rules: dict[Site, Rule] = {}
        failure = self._failure(group, rules)
        if failure is not None and proof.sharded_outputs:
            group.outputs = proof.sharded_outputs
            rules = {}
            failure = self._failure(group, rules)
        watch = None if proof.ranks.first_unit is None else proof.ranks.first_unit.last_region_mode
        if failure is None and self._stored is None and not proof.runs_as_first(proof.eval_mode):
            # Code that runs only in eval mode needs rules too; for exchanges they are learned in that setting again.
            failure = proof.difference(self.plan([group], rules=rules), proof.eval_mode, learning=True)
        if failure is not None or watch is None:
            return failure or "nothing ran sharded"
        elsewhere = watch.inside | watch.outside | self.excluded.keys()
        sliced = {fqn: dim for fqn, dim in watch.sliced.items() if fqn not in elsewhere}
        for fqn, dim in sliced.items():
            shape = attrgetter(fqn)(proof.unit).shape
            group.placements[fqn] = Shard.evenly(dim % len(shape), shape[dim], proof.ranks.size)
        mixed = watch.inside & watch.outside | (set(watch.sliced) - set(sliced))
        group.summed = tuple(sorted(watch.inside - mixed - set(group.placements)))
        # A parameter that is sharded from now on need not be sliced at its use.
        group.rules = {site: rule for site, rule in rules.items() if site[1] != "side" or site[3] not in sliced}
        is_required = bool(mixed or group.outputs) or watch.entered or watch.drew
        rewrites = [(site, rule) for site, rule in group.rules.items() if rule]
        group.watched = is_required or bool(rewrites)
        group.avoidable = bool(rewrites) and not is_required and all(_is_size(site, rule) for site, rule in rewrites)
        return group

    def _failure(self, group: GroupPlan, rules: dict[Site, Rule]) -> str | None:
        # Gradients of weights show no more than outputs and gradients of inputs and biases; the proof compares them.
        weights = frozenset(linear.parameter("weight") for linear in self.linears.values())
        return self._proof.difference(
            self.plan([group], rules=rules),
            self._proof.first,
            learning=True,
            forward_only=not self._check_gradients,
            without=weights - group.vocabulary.keys(),
        )


def _is_size(site: Site, rule: Rule) -> bool:
    """Whether a rule rewrites a size or an offset; other rules are for values or groups."""
    return site[1] == "view" or rule in (("expand",), ("offsets",))
