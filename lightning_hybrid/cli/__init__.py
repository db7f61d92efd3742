"""The command ``lightning-hybrid``: one file per subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_hybrid.cli import checkpoint, verify
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments``, or the command line, name; return the exit status."""
    parser = argparse.ArgumentParser(prog="lightning-hybrid", description="Tools around the strategies.")
    parser.add_argument("--version", action="version", version=f"lightning-hybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    verify.add_to(commands)
    checkpoint.add_to(commands)
    parsed, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else list(arguments))
    try:
        return int(parsed.run(parsed, rest))
    except (ValueError, ImportError, AttributeError, OSError, CheckpointError) as error:
        print(f"lightning-hybrid {parsed.command}: {error}", file=sys.stderr)
        return 2
