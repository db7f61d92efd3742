"""Variants of the plan of one group of linears, the likely ones first.

They differ in how the output features of a projection are arranged (one piece, several, split by heads), in which
integer attributes of the modules are divided, and in whether the code indexes the full projection with offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_hybrid.params.placement import Piece, Placement, Shard
from lightning_hybrid.tensor.plan import Group, LinearLike
from lightning_hybrid.tensor.search.dataflow import Arrangement, LinearDataflow, Pair
from lightning_hybrid.tensor.search.groups import GroupPlan

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
                        how = _heads_text(dataflow, columns, size) or ", ".join(text for text in texts if text)
                        yield GroupPlan(Group("column", *pair, how, origin), dict(placements), attributes, offsets)


def _heads_text(dataflow: LinearDataflow, columns: tuple[str, ...], size: int) -> str:
    """How a projection is split whose output the code views as heads; "" if it does not."""
    is_attention = any(count > 1 for count in heads_of(dataflow, columns))
    return f"attention split by heads over {size} ranks" if is_attention else ""


def heads_of(dataflow: LinearDataflow, columns: tuple[str, ...]) -> list[int]:
    """The numbers of heads as which the code views the outputs of these linears."""
    seen = (dataflow.arrangements[fqn].pieces(dataflow.linears[fqn].num_out)[1] for fqn in columns)
    return [count for counts in seen for count in counts if count is not None]


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
    whole = "convolutions split by channels" if linears[0].is_convolution else "split by output features"
    used = [dataflow.arrangements[linear.fqn].pieces(linear.num_out) for linear in linears]
    in_run = [local_pieces(lengths, heads, size) for lengths, heads in used]
    if all(cut is not None for cut in in_run):
        most = max(len(cut) for cut in in_run if cut is not None)
        yield [cut for cut in in_run if cut is not None], whole if most == 1 else f"split in {most} pieces"
    for count in (1, 3, 2):
        if count > 1 and len(linears) > 1:
            continue  # a group of several linears is not fused
        cuts = [linear.num_out for linear in linears]
        if not any(length % (count * size) for length in cuts):
            words = whole if count == 1 else f"split in {count} pieces"
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
