"""The command ``lightning-hybrid checkpoint convert|inspect|verify``, which needs no model and one core."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import OK, PROBLEM, UsageError, add_command, print_json
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.errors import CheckpointError

# Seconds between two lines of progress where there is no terminal.
_LINE_SECONDS = 5.0

_EXAMPLE = """example:
  lightning-hybrid checkpoint {} model.ckpt{}

exit status: 0 ok; 1 the checkpoint is not valid{}; 2 invalid command line, or no such path"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "checkpoint",
        None,
        text="convert, inspect or verify a distributed checkpoint",
        description="Works on files, and on folders (save_distributed_checkpoint=True); the model is not needed.",
        example=_EXAMPLE.format("verify", "", ""),
    )
    actions = parser.add_subparsers(dest="action", required=True)
    convert = _add(actions, "convert", "a folder to one ordinary .ckpt, or a .ckpt to a folder", _convert, " one.ckpt")
    convert.add_argument("target", type=Path)
    inspect = _add(actions, "inspect", "layout, step, versions and tensors of a folder or file", _inspect)
    inspect.add_argument("--all", action="store_true", help="list every tensor, as --json does (kinds with counts)")
    _add(actions, "verify", "read every byte; exit status 1 if something is not as it was written", _verify)


def _add(actions: Any, name: str, does: str, run: Any, further: str = "") -> argparse.ArgumentParser:
    parser = add_command(
        actions,
        name,
        lambda parsed: _checked(parsed, run),
        text=does,
        description=f"{does[0].upper()}{does[1:]}.",
        example=_EXAMPLE.format(name, further, " or cannot be written" if further else ""),
    )
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "--trust", action="store_true", help="unpickle objects of any class too, which can run arbitrary code"
    )
    return parser


def _checked(parsed: argparse.Namespace, run: Any) -> int:
    from lightning_hybrid.checkpoint.folder import incomplete_path

    if not parsed.source.exists() and not incomplete_path(parsed.source).exists():
        raise UsageError(f"there is no {parsed.source}")
    try:
        return int(run(parsed))
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        print(f"lightning-hybrid checkpoint: {error}", file=sys.stderr)
        return PROBLEM


def _convert(parsed: argparse.Namespace) -> int:
    # Imported late, since this loads torch.
    from lightning_hybrid.checkpoint.convert import to_file, to_folder

    if parsed.target.exists():
        raise UsageError(f"{parsed.target} exists; remove it, or name another target")
    weights_only = not parsed.trust
    is_file = parsed.source.is_file()
    with Progress("convert", interval=_LINE_SECONDS) as progress:
        (to_folder if is_file else to_file)(parsed.source, parsed.target, weights_only=weights_only, tell=progress)
    if parsed.json:
        kinds = ("file", "folder") if is_file else ("folder", "file")
        paths = {"source": str(parsed.source), "target": str(parsed.target)}
        print_json({**paths, "source_kind": kinds[0], "target_kind": kinds[1]})
    else:
        print(f"{parsed.target} is written")
    return OK


def _check_is_folder(parsed: argparse.Namespace) -> None:
    if parsed.source.is_file():
        raise UsageError(
            f"{parsed.source} is one file; {parsed.action} reads folders; convert it first: lightning-hybrid checkpoint"
            f" convert {parsed.source} FOLDER"
        )


def _inspect(parsed: argparse.Namespace) -> int:
    from lightning_hybrid.checkpoint.contents import summary, table

    content = summary(parsed.source, weights_only=not parsed.trust)
    if parsed.json:
        print_json(content)
    else:
        print(table(content, lists_all=parsed.all))
    return OK


def _verify(parsed: argparse.Namespace) -> int:
    from lightning_hybrid.checkpoint.contents import problems

    _check_is_folder(parsed)
    try:
        with Progress("verify", interval=_LINE_SECONDS) as progress:
            found = list(problems(parsed.source, weights_only=not parsed.trust, tell=progress))
    except CheckpointError as error:
        found = [str(error)]
    if parsed.json:
        print_json({"path": str(parsed.source), "is_valid": not found, "problems": found})
    else:
        print(
            "\n".join(found) or f"{parsed.source} is complete: sizes, digests, and every element of every tensor once"
        )
    return PROBLEM if found else OK
