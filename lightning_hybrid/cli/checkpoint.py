"""``lightning-hybrid checkpoint convert|inspect|verify``: without the model, on one core."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the subcommand.

    Args:
        commands: The subparsers of argparse.
    """
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
            "--trust", action="store_true", help="unpickle objects of any class too, which can run code of theirs"
        )


def _convert(known: argparse.Namespace, others: Sequence[str]) -> int:
    _refuse(others)
    # Only now: this loads torch.
    from lightning_hybrid.checkpoint.convert_checkpoint import is_file, to_file, to_folder

    if known.target.exists():
        raise ValueError(f"{known.target} exists; remove it, or name another target")
    weights_only = not known.trust
    if is_file(known.source):
        to_folder(known.source, known.target, weights_only=weights_only)
    else:
        to_file(known.source, known.target, weights_only=weights_only, tell=lambda line: print(line, file=sys.stderr))
    print(f"{known.target} is written")
    return 0


def _inspect(known: argparse.Namespace, others: Sequence[str]) -> int:
    _refuse(others)
    from lightning_hybrid.checkpoint.inspect_checkpoint import table
    from lightning_hybrid.checkpoint.reading import SavedFolder

    print(table(SavedFolder(known.source, weights_only=not known.trust)))
    return 0


def _verify(known: argparse.Namespace, others: Sequence[str]) -> int:
    _refuse(others)
    from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
    from lightning_hybrid.checkpoint.inspect_checkpoint import problems

    try:
        found = list(problems(known.source, weights_only=not known.trust))
    except CheckpointError as error:
        found = [str(error)]
    print("\n".join(found) or f"{known.source} is whole: sizes, digests, and every element of every tensor once")
    return 1 if found else 0


def _refuse(others: Sequence[str]) -> None:
    if others:
        raise ValueError(f"unknown argument {others[0]!r}")
