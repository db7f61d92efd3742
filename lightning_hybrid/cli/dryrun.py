"""The command ``lightning-hybrid dryrun path.to:Module --layout dp=6,tp=8,pp=64``: ranks without their world."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import FLAGS, ConfiguredRun
from lightning_hybrid.cli.command import OK, REFUSED, UsageError, add_command, check_counts, print_json
from lightning_hybrid.cli.module import (
    STATUSES,
    add_layout_to,
    data_and_device_errors,
    layout_and_classes,
    print_memory,
    reads_storage,
    refusals,
)
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.text import counted, print_table, wrapped

if TYPE_CHECKING:
    from lightning_hybrid.layout import ParallelLayout
    from lightning_hybrid.verify import Layout

_EXAMPLE = f"""example:
  lightning-hybrid dryrun train.py:Classifier --layout dp=64,pp=8 --num-nodes 64 --rank 511 -v
  lightning-hybrid dryrun main.py --layout tp=4,pp=2 --num-nodes 16 --devices 8 --rank 0,120-127 --json

{STATUSES}"""
_MOST_RANKS = 512
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


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "dryrun",
        run,
        text="show what any rank of any world would hold and send, in one process",
        description="Builds the module without storage for its parameters, records the training step on one microbatch,"
        " and prints for the chosen ranks: stages and units, process groups, bytes of parameters, gradients, optimizer"
        " states, activations and messages, and the messages of a training step by axis. A world of thousands of ranks"
        f" needs one process on the CPU, and no memory for the weights. No step is trained. {FLAGS}",
        example=_EXAMPLE,
    )
    add_layout_to(parser, "dp=6,tp=8,pp=64")
    parser.add_argument(
        "--rank",
        action="append",
        metavar="R",
        help="ranks to describe: numbers and ranges such as 0,8,16-23, 'stages' for the first rank of each pipeline"
        " rank (default), or 'all'; repeat for several",
    )
    parser.add_argument("--num-nodes", type=int, help="nodes of the world (config's or 1)")
    parser.add_argument("--devices", type=int, help="ranks of a node (those of the layout / nodes)")
    parser.add_argument(
        "--with-storage", action="store_true", help="build parameters with storage, if the module reads their values"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the shapes of shards, and all units")


def run(parsed: argparse.Namespace) -> int:
    """Describe ranks, print them, and return the exit status.

    Raises:
        UsageError: An invalid path, layout, rank or argument of a class, or sizes that do not multiply to the world.
    """
    check_counts(parsed, "num_nodes", "devices")
    content: dict[str, Any] = {}
    with Progress("dryrun") as progress, data_and_device_errors():
        layout, made, precision, num_nodes = layout_and_classes(parsed, progress)
        num_nodes = parsed.num_nodes or num_nodes
        layout = in_world(layout, num_nodes, parsed.devices)
        _check_ranks(parsed.rank or ["stages"], layout.devices)
        import torch  # late, since it takes seconds

        torch.manual_seed(0)
        with refusals(layout, content):
            content |= {"layout": layout.name, **_described(parsed, made, layout, num_nodes, precision, progress)}
    if parsed.json:
        print_json(content)
    else:
        print_ranks(content, verbose=parsed.verbose)
    return OK if content["refused"] is None else REFUSED


def _described(
    parsed: argparse.Namespace,
    made: ConfiguredRun,
    layout: Layout,
    num_nodes: int,
    precision: str,
    progress: Progress,
) -> dict[str, Any]:
    from lightning_hybrid.planning.dry_run.ranks import dry_run
    from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta
    from lightning_hybrid.verify.experiment import fit_arguments, namespace_of

    progress.phase("building the module without storage" if not parsed.with_storage else "building the module")
    building = contextlib.nullcontext() if parsed.with_storage else parameters_on_meta()
    with _needs_storage("while it is built", parsed), building:
        module, data = made.make_module(), made.make_data()
    lightning = namespace_of(module)
    with _needs_storage("while the step is recorded", parsed):
        return dry_run(
            lightning,
            module,
            fit_arguments(lightning, data),
            layout.devices,
            layout.options(None),
            precision,
            lambda sizes: chosen_ranks(parsed.rank or ["stages"], sizes),
            num_nodes=num_nodes,
            with_shapes=parsed.verbose,
            on_phase=progress.phase,
        )


@contextlib.contextmanager
def _needs_storage(when: str, parsed: argparse.Namespace) -> Iterator[None]:
    """Turn the error of code that reads values of parameters without storage into a ``UsageError``."""
    try:
        yield
    except Exception as error:
        if parsed.with_storage or not reads_storage(error):
            raise
        raise UsageError(
            f"the module reads values of parameters {when}, and these have no storage ({str(error).splitlines()[0]});"
            " add --with-storage, which builds it in full"
        ) from error


def in_world(layout: Layout, num_nodes: int, devices: int | None) -> Layout:
    """Return the layout with the number of ranks of a world, whose data-parallel size may be what is left.

    Args:
        layout: Of the strategy's options.
        num_nodes: Number of nodes.
        devices: Ranks of a node; those of the layout on these nodes if None.

    Raises:
        UsageError: The sizes do not multiply to the world.
    """
    from lightning_hybrid.verify.layouts import layout_of_options

    if devices is None:
        if layout.devices % num_nodes:
            raise UsageError(
                f"--layout {layout.name} has {layout.devices} ranks, which {num_nodes} nodes do not divide; set"
                f" --num-nodes {math.gcd(layout.devices, num_nodes)}, or other sizes"
            )
        return layout
    world = num_nodes * devices
    sizes = {name: value for name, value in layout.strategy.items() if name.endswith("_parallel_size")}
    named = sizes.get("data_parallel_size", "auto")
    if named == "auto":
        same = layout.devices // layout.replicas
        if world % same:
            raise UsageError(
                f"{num_nodes} nodes x {devices} devices = {world} ranks, which is no multiple of the {same} ranks of"
                f" one replica in --layout {layout.name}; set other sizes"
            )
        others = {name: value for name, value in layout.strategy.items() if name != "data_parallel_size"}
        return layout_of_options({"data_parallel_size": world // same, **others}, world)
    if layout.devices != world:
        raise UsageError(
            f"--layout {layout.name} has {layout.devices} ranks, and {num_nodes} nodes x {devices} devices are {world};"
            " leave dp out, or set other sizes"
        )
    return layout


def _check_ranks(texts: Sequence[str], world: int) -> None:
    for text in texts:
        if text not in ("stages", "all"):
            _numbers(text, world)
    if "all" in texts and world > _MOST_RANKS:
        raise UsageError(f"--rank all: {world} ranks are more than {_MOST_RANKS}; name some, or use --rank stages")


def chosen_ranks(texts: Sequence[str], layout: ParallelLayout) -> list[int]:
    """Return the ranks that ``--rank`` names, in order."""
    found: set[int] = set()
    for text in texts:
        if text == "all":
            found.update(range(layout.world_size))
        elif text == "stages":
            found.update(range(0, layout.world_size, layout.world_size // layout.pipeline_parallel_size))
        else:
            found.update(_numbers(text, layout.world_size))
    return sorted(found)


def _numbers(text: str, world: int) -> list[int]:
    found: list[int] = []
    for entry in text.split(","):
        first, dash, last = entry.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                f"--rank {text!r}: {entry.strip()!r} is no number, no range such as 16-23, 'stages' or 'all'"
            )
        ranks = range(int(first), int(last or first) + 1)
        if not ranks:
            raise UsageError(f"--rank {text}: {entry.strip()} has no ranks; write the smaller one first")
        outside = next((rank for rank in ranks if rank >= world), None)
        if outside is not None:
            raise UsageError(f"--rank {text}: rank {outside} is not in a world of {world} ranks (0 to {world - 1})")
        found += ranks
    if len(found) > _MOST_RANKS:
        raise UsageError(f"--rank {text}: {len(found)} ranks are more than {_MOST_RANKS}; name fewer")
    return found


# -- the text that is printed ------------------------------------------------------------------------------------------


def print_ranks(content: dict[str, Any], *, verbose: bool) -> None:
    """Print a dry run.

    Args:
        content: As ``dry_run`` returns it, with the name of the layout.
        verbose: Whether to print the shape of each shard, and all ranks in full.
    """
    if content["refused"] is not None:
        print(wrapped(f"refused: {content['refused']}"))
        return
    print(_headline(content))
    for note in content["notes"]:
        print(f"note: {note}")
    print()
    ranks = content["rank"]
    named = {(f"rank {each['rank']}", ", ".join(map(str, each["stages"]))): each["bytes"] for each in ranks}
    print_memory(["bytes of a rank, estimated", "stages"], named, content["offloaded"])
    print_table(_message_rows(ranks))
    _print_tensor_plans(content["tensor_plans"])
    if verbose or len(ranks) <= _FEW:
        for rank in ranks:
            _print_rank(rank, verbose=verbose)
    else:
        print(f"{len(ranks)} ranks; --rank R shows the units, groups and messages of one, -v those of all")


def _headline(content: dict[str, Any]) -> str:
    size = f"{content['ranks']:,} ranks on {counted(content['nodes'], 'node')}"
    samples = "" if content["samples"] is None else f" of {content['samples']} samples"
    count = content["num_microbatches"]
    return f"{content['layout']}: {size}; {counted(count, 'microbatch')} of a replica's batch{samples}"


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
    from lightning_hybrid.step.objects.modules import lines_of_layers

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
            print(f"  {name}: {_members(rank['groups'][axis])} on {counted(nodes, 'node')}")
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
        print_table(rows)
    else:
        print()
    if verbose and rank.get("shapes"):
        shapes: list[tuple[str, ...]] = [("  parameter", "shard", "full")]
        for name, shape in rank["shapes"].items():
            shapes.append((f"  {name}", _shape(shape["local"]), _shape(shape["full"])))
        print_table(shapes)


def _members(ranks: Sequence[int]) -> str:
    """Ranks in short: all of a few, else the first two and the last."""
    if len(ranks) <= _FEW_MEMBERS:
        return f"{len(ranks)} ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"
