"""The command ``lightning-hybrid``: one file per subcommand."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from lightning_hybrid.cli import (
    checkpoint,
    dryrun,
    env,
    explain,
    explain_error,
    hardware,
    migrate,
    plan,
    schedule,
    verify,
)
from lightning_hybrid.cli.classes import split_class_flags
from lightning_hybrid.cli.command import EXIT_STATUSES, PROBLEM, READER_ENDED, USAGE, UsageError
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments``, or the command line, name; return the exit status.

    An error of the user's own code is raised as it is, so that Python prints its traceback.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-hybrid",
        description="Tools around the strategies.",
        epilog=f"example:\n  lightning-hybrid schedule 1f1b --ranks 4 --microbatches 8\n\n{EXIT_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-hybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for subcommand in (verify, explain, plan, dryrun, schedule, hardware, checkpoint, migrate, env, explain_error):
        subcommand.add_to(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in ([], ["help"]):
        given = [*given[1:2], "--help"]
    others, class_flags = split_class_flags(given)
    parsed, unknown = parser.parse_known_args(others)
    try:
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]!r}")
        if class_flags and not hasattr(parsed, "module"):
            raise UsageError(f"unknown argument {class_flags[0]!r}")
        parsed.class_flags = class_flags
        status = int(parsed.run(parsed))
        sys.stdout.flush()  # here, where an error of it is handled
        return status
    except BrokenPipeError:
        if not _reader_has_ended():
            raise
        return READER_ENDED
    except UsageError as error:
        print(f"lightning-hybrid {parsed.command}: {error}", file=sys.stderr)
        return USAGE
    except CheckpointError as error:
        print(f"lightning-hybrid {parsed.command}: {error}", file=sys.stderr)
        return PROBLEM


def _reader_has_ended() -> bool:
    """Whether the reader of the output has ended, as after ``| head``; what is left of it is then dropped."""
    output = select.poll()
    output.register(sys.stdout, select.POLLERR)
    if not output.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # Python flushes once more at its end
    os.close(nowhere)
    return True
