"""The command ``lightning-hybrid verify path.to:Module --data path.to:DataModule --layout pp=2``."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hybrid.verify import Layout


@dataclass(frozen=True)
class Target:
    """A class or function by its path, with keyword arguments; any process can import and call it.

    Attributes:
        path: ``path.to:Name``, or ``path/to/file.py:Name``.
        arguments: Keyword arguments of the call.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import it.

        Raises:
            ValueError: The path is not a module and a name in it.
            ImportError: There is no such module.
            AttributeError: The module has no such name.
        """
        module, colon, name = self.path.rpartition(":")
        if not colon or not module or not name:
            raise ValueError(f"{self.path!r} names no class; write path.to:Name or path/to/file.py:Name")
        folder = os.getcwd()
        if module.endswith(".py"):
            path = Path(module).resolve()
            if not path.exists():
                raise ImportError(f"{self.path!r}: there is no file {path}")
            folder, module = str(path.parent), path.stem
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))

    def __call__(self) -> Any:
        """Import it, call it with the arguments, and return the result."""
        return self.load()(**self.arguments)


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = commands.add_parser(
        "verify",
        help="train a module under layouts and in one process, and compare the numbers",
        description="Trains a module for a few steps in one process and under each layout, and compares losses, "
        "metrics and the updates of all parameters. Exit status 1 if any differs or fails.",
        epilog="--module.NAME VALUE and --data.NAME VALUE are arguments of the two classes.",
    )
    parser.add_argument("module", help="path.to:Module or path/to/file.py:Module")
    parser.add_argument("--data", help="path.to:DataModule, or a function that makes loaders")
    parser.add_argument("--layout", action="append", metavar="pp=2,dp=2", help="repeat for several; pp=2 if none")
    parser.add_argument(
        "--tensor-plan", action="append", metavar="'*.up_proj=colwise'", help="of layouts with tp=; repeat for several"
    )
    parser.add_argument("--steps", type=int, default=4, help="batches of an epoch and of a validation (%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=2, help="of each replica's batch (%(default)s)")
    parser.add_argument("--precision", default="64-true", help="as Lightning spells it (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="a layout that is refused fails too")
    parser.set_defaults(run=run)


def run(known: argparse.Namespace, rest: Sequence[str]) -> int:
    """Verify, print a table, and return the exit status: 0 if all layouts pass.

    ``rest`` are ``--module.NAME VALUE`` and ``--data.NAME VALUE``, which argparse did not recognize.

    Raises:
        ValueError: An unknown argument, an invalid layout, or a count below 1.
        ImportError: The module or data cannot be imported.
        AttributeError: Their file has no such name.
    """
    for name in ("steps", "epochs", "num_microbatches"):
        if getattr(known, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(known, name)}; use 1 or more")
    of_module, of_data = arguments_of(rest)
    if of_data and known.data is None:
        raise ValueError(f"--data.{next(iter(of_data))} is given without --data path.to:DataModule")
    # Imported late, since this loads torch.
    from lightning_hybrid.verify import Experiment, Verification, parse_layout, table

    layouts = [parse_layout(text, known.tensor_plan or ()) for text in known.layout or ["pp=2"]]
    for layout in layouts:
        check_options(layout)
    module = Target(known.module, of_module)
    data = None if known.data is None else Target(known.data, of_data)
    for target in (module, data):
        if target is not None:
            target.load()  # a misspelled path fails here, once, and not in every process
    experiment = Experiment(
        make_module=module,
        make_data=data,
        steps=known.steps,
        epochs=known.epochs,
        num_microbatches=known.num_microbatches,
        precision=known.precision,
        seed=known.seed,
    )
    verification = Verification(experiment, timeout=known.timeout)
    reports = []
    for layout in layouts:
        print(f"verifying {layout.name} on {layout.devices} processes ...", file=sys.stderr, flush=True)
        reports.append(verification.check(layout))
    print(table(reports))
    for note in dict.fromkeys(note for report in reports for note in report.notes):
        print(f"note: {note}")
    return 0 if all(report.passes(strict=known.strict) for report in reports) else 1


def check_options(layout: Layout) -> None:
    """Check that a layout names options of the strategy.

    Raises:
        ValueError: A name is not an option.
    """
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

    known = [name for name in inspect.signature(Hybrid3DStrategy.__init__).parameters if name != "self"]
    for name in layout.strategy:
        if name not in known:
            near = difflib.get_close_matches(name, known) or ["dp", "tp", "pp", "cp", "ep", "stages", "m", "zero"]
            raise ValueError(f"--layout {layout.name!r}: {name!r} is no option of the strategy; nearest: {near}")


def arguments_of(rest: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse ``--module.NAME VALUE`` and ``--data.NAME VALUE`` to two dicts; values are Python's literals, or text.

    Raises:
        ValueError: Another argument.
    """
    found: dict[str, dict[str, Any]] = {"module": {}, "data": {}}
    remaining = list(rest)
    while remaining:
        flag, equals, value = remaining.pop(0).partition("=")
        owner, dot, name = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or not dot or owner not in found or not name.isidentifier():
            raise ValueError(f"unknown argument {flag!r}; arguments of the classes are --module.NAME and --data.NAME")
        if not equals:
            if not remaining:
                raise ValueError(f"{flag} needs a value")
            value = remaining.pop(0)
        try:
            found[owner][name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[owner][name] = value
    return found["module"], found["data"]
