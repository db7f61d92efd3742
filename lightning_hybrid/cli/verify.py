"""The command ``lightning-hybrid verify path.to:Module --data path.to:DataModule --layout pp=2``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import FLAGS
from lightning_hybrid.cli.command import (
    OK,
    PROBLEM,
    REFUSED,
    add_command,
    check_counts,
    print_json,
)
from lightning_hybrid.cli.module import (
    IMPORTING,
    add_classes_to,
    add_precision_to,
    add_tensor_plan_to,
    check_names,
    checked,
    configured,
    layout_of,
)
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.text import wrapped

if TYPE_CHECKING:
    from lightning_hybrid.verify import Layout, Report, Verification

_EXAMPLE = """example:
  lightning-hybrid verify train.py:Classifier --layout pp=2 --layout dp=2
  lightning-hybrid verify main.py --config config.yaml --module.width 32

exit status: 0 all layouts are the same; 1 one is different, or failed; 2 invalid command line;
3 none is different, and one is refused (1 with --strict)"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "verify",
        run,
        text="train a module under layouts and in one process, and compare the numbers",
        description="Trains a module for a few steps in one process and under each layout, and compares losses, "
        f"metrics and the updates of all parameters. {FLAGS}",
        example=_EXAMPLE,
        json="print the reports as JSON",
    )
    add_classes_to(parser)
    parser.add_argument("--layout", action="append", metavar="pp=2,dp=2", help="repeat for several (config's or pp=2)")
    add_tensor_plan_to(parser)
    parser.add_argument("--steps", type=int, default=4, help="batches of an epoch and of a validation (%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=2, help="of each replica's batch (%(default)s)")
    add_precision_to(parser, "%(default)s", default="64-true")
    parser.add_argument("--seed", type=int, help="(config's or 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="a layout that is refused gives exit status 1 too")


def run(parsed: argparse.Namespace) -> int:
    """Verify, print a table, and return the exit status.

    Raises:
        UsageError: An invalid path, layout or argument of a class, or a count below 1.
    """
    check_counts(parsed, "steps", "epochs", "num_microbatches")
    reports: list[Report] = []
    for text in parsed.layout or ():
        check_names(text, parsed.tensor_plan)
    with Progress("verify") as progress:
        progress.phase(IMPORTING)
        verification, layouts = _verification(parsed, progress)
        for layout in layouts:
            progress.start(layout.name, len(reports), len(layouts))
            reports.append(verification.check(layout))
    for traceback in dict.fromkeys(report.traceback for report in reports if report.traceback):
        print(traceback, file=sys.stderr)
    if parsed.json:
        print_json([asdict(report) for report in reports])
    else:
        from lightning_hybrid.verify import table

        print(table(reports))
        for line in (line for report in reports for line in report.worst_lines()):
            print(line)
        for note in dict.fromkeys(note for report in reports for note in report.notes):
            names = ", ".join(report.layout for report in reports if note in report.notes)
            print(wrapped(f"note on {names}: {note}"))
    if not all(report.passes(strict=parsed.strict) for report in reports):
        return PROBLEM
    return REFUSED if any(report.outcome == "refused" for report in reports) else OK


def _verification(parsed: argparse.Namespace, progress: Progress) -> tuple[Verification, list[Layout]]:
    # Imported late, since this loads torch.
    from lightning_hybrid.verify import Experiment, Verification

    made, config = configured(parsed)
    if config.unused:
        print(f"not used from the config: {', '.join(f'trainer.{name}' for name in config.unused)}", file=sys.stderr)
    layouts = [layout_of(text, parsed.tensor_plan) for text in parsed.layout or ()]
    layouts = layouts or [checked(config.layout) if config.layout else layout_of("pp=2", parsed.tensor_plan)]
    experiment = Experiment(
        make_module=made.make_module,
        make_data=made.make_data,
        steps=parsed.steps,
        epochs=parsed.epochs,
        num_microbatches=parsed.num_microbatches,
        precision=parsed.precision,
        seed=next(seed for seed in (parsed.seed, config.seed, 1) if seed is not None),
        trainer=config.arguments,
    )
    return Verification(experiment, timeout=parsed.timeout, on_phase=progress.phase), layouts
