"""Prints what becomes of each case under each layout: ``python -m conformance.table [NAME ...]`` in ``tests``."""

import sys
import time

from conformance.harness import Checked, layouts_of
from conformance.registry import CASES

from harness.worlds.worlds_plugin import Worlds, start_server


def main(names: list[str]) -> None:
    start_server()
    worlds = Worlds(capture=True)
    try:
        for name in names or CASES:
            checked = Checked(worlds, CASES[name])
            for layout in layouts_of(CASES[name]):
                start = time.monotonic()
                outcome = checked.outcome(layout)
                seconds = time.monotonic() - start
                against = "" if outcome.reference == "one process" else f" ({outcome.reference})"
                print(
                    f"{name} | {layout.name} | {outcome.kind}{against} | {outcome.reason} | {seconds:.1f} s", flush=True
                )
    finally:
        worlds.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
