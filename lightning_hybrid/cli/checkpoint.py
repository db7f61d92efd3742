"""The command ``lightning-hybrid checkpoint convert|inspect|verify``, which needs no model and one core."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = commands.add_parser(
        "checkpoint",
        help="convert, inspect or verify a distributed checkpoint",
        description="Works on the folders that save_distributed_checkpoint=True writes; the model is not needed.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    convert = actions.add_parser("convert", help="a folder to one ordinary .ckpt, or a .ckpt to a folder")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.set_defaults(run=_convert)
    inspect = actions.add_parser("inspect", help="layout, step, versions, and every tensor")
    inspect.add_argument("source", type=Path)
    inspect.set_defaults(run=_inspect)
    verify = actions.add_parser("verify", help="read every byte; exit status 1 if something is not as it was written")
    verify.add_argument("source", type=Path)
    verify.set_defaults(run=_verify)
    for action in (convert, inspect, verify):
        action.add_argument(
            "--trust", action="store_true", help="unpickle objects of any class too, which can run arbitrary code"
        )


def _convert(parsed: argparse.Namespace, rest: Sequence[str]) -> int:
    _refuse(rest)
    # Imported late, since this loads torch.
    from lightning_hybrid.checkpoint.convert_between_folder_and_file import to_file, to_folder

    if parsed.target.exists():
        raise ValueError(f"{parsed.target} exists; remove it, or name another target")
    weights_only = not parsed.trust
    if parsed.source.is_file():
        to_folder(parsed.source, parsed.target, weights_only=weights_only)
    else:
        to_file(parsed.source, parsed.target, weights_only=weights_only, tell=lambda line: print(line, file=sys.stderr))
    print(f"{parsed.target} is written")
    return 0


def _inspect(parsed: argparse.Namespace, rest: Sequence[str]) -> int:
    _refuse(rest)
    from lightning_hybrid.checkpoint.inspect_checkpoint import table
    from lightning_hybrid.checkpoint.reading import SavedFolder

    print(table(SavedFolder(parsed.source, weights_only=not parsed.trust)))
    return 0


def _verify(parsed: argparse.Namespace, rest: Sequence[str]) -> int:
    _refuse(rest)
    from lightning_hybrid.checkpoint.verify_checkpoint import problems
    from lightning_hybrid.errors import CheckpointError

    try:
        found = list(problems(parsed.source, weights_only=not parsed.trust))
    except CheckpointError as error:
        found = [str(error)]
    print("\n".join(found) or f"{parsed.source} is complete: sizes, digests, and every element of every tensor once")
    return 1 if found else 0


def _refuse(rest: Sequence[str]) -> None:
    if rest:
        raise ValueError(f"unknown argument {rest[0]!r}")
