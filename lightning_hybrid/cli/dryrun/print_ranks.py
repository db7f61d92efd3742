"""The text that ``lightning-hybrid dryrun`` prints: tables of ranks, and more of each rank if they are few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = ("parameters", "gradients", "optimizer_states", "activations", "gathered", "messages", "total")
_AXES = {
    "pp": "pipeline",
    "data": "data",
    "dp_shard": "shards of a replica",
    "dp_replicate": "copies of shards",
    "cp": "context",
    "tp": "tensor",
    "ep": "experts",
    "replica": "one replica",
}
_FEW = 4  # ranks that are described in full
_FEW_MEMBERS = 8


def print_ranks(content: dict[str, Any], *, verbose: bool) -> None:
    """Print a dry run.

    Args:
        content: As ``dry_run`` returns it, with the name of the layout.
        verbose: Whether to print the shape of each shard, and all ranks in full.
    """
    if content["refused"] is not None:
        print(f"refused: {content['refused']}")
        return
    print(_headline(content))
    for note in content["notes"]:
        print(f"note: {note}")
    print()
    ranks = content["rank"]
    print_rows(_memory_rows(ranks))
    print_rows(_message_rows(ranks))
    _print_tensor_plans(content["tensor_plans"])
    if verbose or len(ranks) <= _FEW:
        for rank in ranks:
            _print_rank(rank, verbose=verbose)
    else:
        print(f"{len(ranks)} ranks; --rank R shows the units, groups and messages of one, -v those of all")


def _headline(content: dict[str, Any]) -> str:
    size = f"{content['ranks']:,} ranks on {content['nodes']:,} node{'s' * (content['nodes'] != 1)}"
    samples = "" if content["samples"] is None else f" of {content['samples']} samples"
    count = content["num_microbatches"]
    return f"{content['layout']}: {size}; {count} microbatch{'es' * (count != 1)} of a replica's batch{samples}"


def _memory_rows(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("bytes of a rank, estimated", "stages", *(k.replace("_", " ") for k in _KINDS))]
    for rank in ranks:
        sizes = [rank["bytes"][kind] for kind in _KINDS]
        stages = ", ".join(map(str, rank["stages"]))
        rows.append((f"rank {rank['rank']}", stages, *("unknown" if size is None else f"{size:,}" for size in sizes)))
    return rows


def _message_rows(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    axes = [
        axis for axis in ("pipeline", "data", "context", "tensor") if any(axis in rank["sent_bytes"] for rank in ranks)
    ]
    if not axes:
        return [("a step sends no tensors of the model to other ranks",)]
    rows: list[tuple[str, ...]] = [
        ("sent in a training step", *(f"{a} {w}" for a in axes for w in ("messages", "bytes")))
    ]
    for rank in ranks:
        cells: list[str] = []
        for axis in axes:
            count = sum(each["count"] for each in rank["messages"] if each["axis"] == axis)
            cells += [f"{count:,}", f"{rank['sent_bytes'].get(axis, 0):,}"]
        rows.append((f"rank {rank['rank']}", *cells))
    return rows


def _print_tensor_plans(plans: Mapping[str, Sequence[str]]) -> None:
    from lightning_hybrid.step.objects.repeated_layers import lines_of_layers

    if plans:
        print("\n".join(["layers on tensor and context ranks", *(f"  {line}" for line in lines_of_layers(plans)), ""]))


def _print_rank(rank: dict[str, Any], *, verbose: bool) -> None:
    place = ", ".join(f"{axis} {index}" for axis, index in rank["coordinates"].items())
    print(f"rank {rank['rank']} on node {rank['node']}: {place}")
    units = [unit or "the module" for unit in rank["units"]]
    shown = units if verbose or len(units) <= _FEW_MEMBERS else [units[0], "..", f"{units[-1]} ({len(units)})"]
    if units:
        print(f"  units: {', '.join(shown).replace(', .., ', ' .. ')}")
    print(f"  parameters: {rank['parameters']:,}")
    for axis, name in _AXES.items():
        if axis in rank["groups"] and not (axis == "dp_replicate" and rank["groups"][axis] == rank["groups"]["data"]):
            nodes = rank["nodes_of_groups"][axis]
            print(f"  {name}: {_members(rank['groups'][axis])} on {nodes} node{'s' * (nodes != 1)}")
    if rank["messages"]:
        rows: list[tuple[str, ...]] = [
            ("  sends in a training step", "axis", "as", "messages", "bytes put in", "bytes sent")
        ]
        for each in rank["messages"]:
            how = each["operation"].replace("_", "-") + (
                f" over {each['num_ranks']}" if each["operation"] != "send" else ""
            )
            counts = f"{each['count']:,}", f"{each['nbytes']:,}", f"{each['sent_bytes']:,}"
            rows.append((f"  {each['content']}", each["axis"], how, *counts))
        print_rows(rows)
    else:
        print()
    if verbose and rank.get("shapes"):
        shapes: list[tuple[str, ...]] = [("  parameter", "shard", "full")]
        for name, shape in rank["shapes"].items():
            shapes.append((f"  {name}", _shape(shape["local"]), _shape(shape["full"])))
        print_rows(shapes)


def _members(ranks: Sequence[int]) -> str:
    """Ranks in short: all of a few, else the first two and the last."""
    if len(ranks) <= _FEW_MEMBERS:
        return f"{len(ranks)} ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"


def print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of cells in columns, the first one flush left, and an empty line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))
    print()
