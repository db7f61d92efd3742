"""The command ``lightning-hybrid dryrun path.to:Module --layout dp=6,tp=8,pp=64``: ranks without their world."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.dryrun.print_ranks import print_ranks
from lightning_hybrid.cli.errors_of_data_and_device import data_and_device_errors, reads_storage
from lightning_hybrid.cli.exit_status_and_json_output import OK, REFUSED, UsageError, print_json
from lightning_hybrid.cli.module_and_data_from_cli import FLAGS
from lightning_hybrid.cli.progress_bar import Progress
from lightning_hybrid.cli.verify import (
    add_classes_to,
    add_precision_to,
    add_tensor_plan_to,
    checked,
    configured,
    layout_of,
)

if TYPE_CHECKING:
    from lightning_hybrid.layout import ParallelLayout
    from lightning_hybrid.verify import Layout

_EXAMPLE = """example:
  lightning-hybrid dryrun examples/quickstart.py:Classifier --layout dp=64,pp=8 --num-nodes 64 --rank 511 -v
  lightning-hybrid dryrun examples/gpt_cli.py --layout tp=4,pp=2 --num-nodes 16 --devices 8 --rank 0,120-127 --json

exit status: 0 the step can be run under the layout; 2 invalid command line; 3 it cannot: the reason is printed,
with the traceback if it is an error of your step. Other errors of your code give their traceback and 1"""
_MOST_RANKS = 512


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = commands.add_parser(
        "dryrun",
        help="show what any rank of any world would hold and send, in one process",
        description="Builds the module without storage for its parameters, records the training step on one microbatch,"
        " and prints for the chosen ranks: stages and units, process groups, bytes of parameters, gradients, optimizer"
        " states, activations and messages, and the messages of a training step by axis. A world of thousands of ranks"
        f" needs one process on the CPU, and no memory for the weights. No step is trained. {FLAGS}",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_classes_to(parser)
    parser.add_argument("--layout", metavar="dp=6,tp=8,pp=64", help="(config's or pp=2)")
    add_tensor_plan_to(parser)
    parser.add_argument(
        "--rank",
        action="append",
        metavar="R",
        help="ranks to describe: numbers and ranges such as 0,8,16-23, 'stages' for the first rank of each pipeline"
        " rank (default), or 'all'; repeat for several",
    )
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes of the world (%(default)s)")
    parser.add_argument("--devices", type=int, help="ranks of a node (those of the layout / nodes)")
    add_precision_to(parser, "config's or 32-true")
    parser.add_argument(
        "--with-storage", action="store_true", help="build parameters with storage, if the module reads their values"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the shapes of shards, and all units")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Describe ranks, print them, and return the exit status.

    Raises:
        UsageError: An invalid path, layout, rank or argument of a class, or sizes that do not multiply to the world.
    """
    with Progress("dryrun") as progress, data_and_device_errors():
        content = _described(parsed, progress)
    if parsed.json:
        print_json(content)
    else:
        print_ranks(content, verbose=parsed.verbose)
    return OK if content["refused"] is None else REFUSED


def _described(parsed: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    for name in ("num_nodes", "devices"):
        if getattr(parsed, name) is not None and getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}={getattr(parsed, name)}; use 1 or more")
    progress.phase("importing the classes")
    made, config = configured(parsed)
    if parsed.layout is None and config.layout:
        layout = _checked(checked(config.layout), parsed)
    else:
        layout = _checked(layout_of(parsed.layout or "pp=2", parsed.tensor_plan), parsed)
    # Imported late, since this loads torch.
    import torch

    from lightning_hybrid.verify.records.run_record_and_recorder import describe_failure

    torch.manual_seed(0)
    progress.phase("building the module without storage" if not parsed.with_storage else "building the module")
    try:
        module, data = _made(made, with_storage=parsed.with_storage)
        return _dry_run(module, data, layout, parsed, parsed.precision or config.precision or "32-true", progress)
    except UsageError:
        raise
    except Exception as error:
        if not parsed.with_storage and reads_storage(error):
            raise _without_storage("while the step is recorded", error) from error
        if not describe_failure(error, steps_done=0).refused:
            raise
        return {"layout": layout.name, "refused": f"{type(error).__name__}: {error}"}


def _checked(layout: Layout, parsed: argparse.Namespace) -> Layout:
    """Return the layout with the ranks of the world, which has the chosen ones; before the module is made."""
    layout = in_world(layout, parsed.num_nodes, parsed.devices)
    _check_ranks(parsed.rank or ["stages"], layout.devices)
    return layout


def _without_storage(when: str, error: Exception) -> UsageError:
    line = str(error).splitlines()[0]
    return UsageError(
        f"the module reads values of parameters {when}, and these have no storage ({line}); add --with-storage, which"
        " builds it in full"
    )


def _made(made: Any, *, with_storage: bool) -> tuple[Any, Any]:
    """Make the user's module and its data.

    Raises:
        UsageError: The module reads values of its parameters while it is built.
    """
    from lightning_hybrid.step.deferred_init.parameters_on_meta import parameters_on_meta

    if with_storage:
        return made.make_module(), made.make_data()
    try:
        with parameters_on_meta():
            return made.make_module(), made.make_data()
    except Exception as error:
        if not reads_storage(error):
            raise
        raise _without_storage("while it is built", error) from error


def _dry_run(
    module: Any, data: Any, layout: Layout, parsed: argparse.Namespace, precision: str, progress: Progress
) -> dict[str, Any]:
    from lightning_hybrid.strategies.dry_run.describe_ranks import dry_run
    from lightning_hybrid.verify.run_experiment import fit_arguments, namespace_of

    lightning = namespace_of(module)
    content: dict[str, Any] = dry_run(
        lightning,
        module,
        fit_arguments(lightning, data),
        layout.devices,
        layout.options(None),
        precision,
        lambda sizes: chosen_ranks(parsed.rank or ["stages"], sizes),
        num_nodes=parsed.num_nodes,
        with_shapes=parsed.verbose,
        on_phase=progress.phase,
    )
    return {"layout": layout.name, **content}


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
