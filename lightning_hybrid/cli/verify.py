"""The command ``lightning-hybrid verify path.to:Module --data path.to:DataModule --layout pp=2``."""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.class_targets import FLAGS, targets
from lightning_hybrid.cli.exit_status import OK, PROBLEM, REFUSED, UsageError, print_json, usage_errors

if TYPE_CHECKING:
    from lightning_hybrid.verify import Layout, Report

_EXAMPLE = """example:
  lightning-hybrid verify path.to:Module --data path.to:DataModule --data.batch_size 16 --layout pp=2 --layout dp=2,pp=2

exit status: 0 all layouts are the same; 1 one is different, or failed; 2 invalid command line;
3 none is different, and one is refused (1 with --strict)"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = commands.add_parser(
        "verify",
        help="train a module under layouts and in one process, and compare the numbers",
        description="Trains a module for a few steps in one process and under each layout, and compares losses, "
        f"metrics and the updates of all parameters. {FLAGS}",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_classes_to(parser)
    parser.add_argument("--layout", action="append", metavar="pp=2,dp=2", help="repeat for several; pp=2 if none")
    add_tensor_plan_to(parser)
    parser.add_argument("--steps", type=int, default=4, help="batches of an epoch and of a validation (%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=2, help="of each replica's batch (%(default)s)")
    parser.add_argument("--precision", default="64-true", help="as Lightning spells it (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="a layout that is refused gives exit status 1 too")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.set_defaults(run=run)


def add_classes_to(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the user's classes."""
    parser.add_argument("module", help="path.to:Module or path/to/file.py:Module")
    parser.add_argument("--data", help="path.to:DataModule, or a function that makes loaders; the module's own if none")


def add_tensor_plan_to(parser: argparse.ArgumentParser) -> None:
    """Add the argument for entries of a plan for tensor ranks."""
    parser.add_argument(
        "--tensor-plan", action="append", metavar="'*.up_proj=colwise'", help="of layouts with tp=; repeat for several"
    )


def run(parsed: argparse.Namespace) -> int:
    """Verify, print a table, and return the exit status.

    Raises:
        UsageError: An invalid path, layout or argument of a class, or a count below 1.
    """
    for name in ("steps", "epochs", "num_microbatches"):
        if getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}={getattr(parsed, name)}; use 1 or more")
    # Imported late, since this loads torch.
    from lightning_hybrid.verify import Experiment, Verification, table

    layouts = [layout_of(text, parsed.tensor_plan) for text in parsed.layout or ["pp=2"]]
    module, data = targets(parsed.module, parsed.data, parsed.class_flags)
    experiment = Experiment(
        make_module=module,
        make_data=data,
        steps=parsed.steps,
        epochs=parsed.epochs,
        num_microbatches=parsed.num_microbatches,
        precision=parsed.precision,
        seed=parsed.seed,
    )
    verification = Verification(experiment, timeout=parsed.timeout)
    reports: list[Report] = []
    for layout in layouts:
        print(f"verifying {layout.name} on {layout.devices} processes ...", file=sys.stderr, flush=True)
        reports.append(verification.check(layout))
    for traceback in dict.fromkeys(report.traceback for report in reports if report.traceback):
        print(traceback, file=sys.stderr)
    if parsed.json:
        print_json([asdict(report) for report in reports])
    else:
        print(table(reports))
        for note in dict.fromkeys(note for report in reports for note in report.notes):
            print(f"note: {note}")
    if not all(report.passes(strict=parsed.strict) for report in reports):
        return PROBLEM
    return REFUSED if any(report.outcome == "refused" for report in reports) else OK


def layout_of(text: str, tensor_plan: list[str] | None) -> Layout:
    """Parse a layout, and check that it names options of the strategy.

    Raises:
        UsageError: It does not, or has an entry without a value or with one that the option does not take.
    """
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy
    from lightning_hybrid.verify import parse_layout

    with usage_errors():
        layout = parse_layout(text, tensor_plan or ())
    parameters = inspect.signature(Hybrid3DStrategy.__init__).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    for name in layout.strategy:
        if name not in known:
            near = difflib.get_close_matches(name, known) or ["dp", "tp", "pp", "cp", "ep", "stages", "m", "zero"]
            raise UsageError(f"--layout {layout.name!r}: {name!r} is no option of the strategy; nearest: {near}")
    with usage_errors():  # values that no module could be run with
        Hybrid3DStrategy(**layout.options(None))
    return layout
