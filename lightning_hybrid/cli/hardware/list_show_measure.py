"""The subcommands ``hardware list``, ``hardware show NAME`` and ``hardware measure``; the first two import no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.exit_status_and_json_output import OK, UsageError, print_json, usage_errors
from lightning_hybrid.planner.hardware.hardware import PRESETS, Hardware, load_hardware, preset_names
from lightning_hybrid.planner.hardware.write_hardware import hardware_to_table, hardware_to_toml

_EXAMPLE = """example:
  lightning-hybrid hardware list
  lightning-hybrid hardware measure --output mine.toml

exit status: 0 ok; 2 invalid command line, or an unknown name"""

_LIST_EXAMPLE = """example:
  lightning-hybrid hardware list

exit status: 0 ok"""

_SHOW_EXAMPLE = """example:
  lightning-hybrid hardware show h100

exit status: 0 ok; 2 invalid command line, or an unknown name"""

_MEASURE_EXAMPLE = """example:
  lightning-hybrid hardware measure --output mine.toml

exit status: 0 ok; 2 invalid command line, or an unknown name"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = _parser(
        commands,
        "hardware",
        "describe devices and links for the planner: presets, or measured here",
        "Lists and shows the descriptions of hardware that the planner reads, and measures this machine.",
        _EXAMPLE,
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    listed = _parser(subcommands, "list", "presets in a table", "Lists the presets.", _LIST_EXAMPLE)
    listed.set_defaults(run=run_list)
    shown = _parser(subcommands, "show", "one description", "Prints one description as TOML.", _SHOW_EXAMPLE)
    shown.add_argument("name", help="of a preset, or the path of a TOML file")
    shown.set_defaults(run=run_show)
    measured = _parser(
        subcommands,
        "measure",
        "measure this machine",
        "Measures this machine in less than a minute: matrix products by number format, memory, starts of kernels,"
        " copies to the host, an optimizer on the host, and all-reduces between local ranks over NCCL or gloo."
        " Prints the description as TOML. Run it while nothing else runs.",
        _MEASURE_EXAMPLE,
    )
    measured.add_argument("--output", type=Path, metavar="FILE", help="write the TOML file instead of printing it")
    measured.add_argument("--like", metavar="NAME", help="preset or file that gives the links between nodes")
    measured.add_argument("--device", choices=("cuda", "cpu"), help="(the GPU if there is one)")
    measured.add_argument("--ranks", type=int, help="ranks between which links are measured (every GPU, or 2)")
    measured.set_defaults(run=run_measure)
    for each in (listed, shown, measured):
        each.add_argument("--json", action="store_true", help="print JSON")


def _parser(commands: Any, name: str, text: str, description: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def run_list(parsed: argparse.Namespace) -> int:
    """Print a row for each preset, and return the exit status."""
    presets = [load_hardware(name) for name in preset_names()]
    if parsed.json:
        print_json({each.name: hardware_to_table(each) for each in presets})
        return OK
    print(f"{'name':10}{'memory':>9}{'products':>22}{'memory':>11}{'in node':>10}{'node':>9}{'devices':>9}")
    print(f"{'':10}{'GB':>9}{'TFLOP/s':>22}{'GB/s':>11}{'GB/s':>10}{'GB/s':>9}{'in node':>9}")
    for each in presets:
        dtype, flops = max(each.product_flops.items(), key=lambda item: (item[0] != "float32", item[1]))
        within, between = (max(curve.bandwidths) / 1e9 for curve in (each.within_node, each.between_nodes))
        print(
            f"{each.name:10}{each.memory / 1e9:9.1f}{f'{dtype} {flops / 1e12:g}':>22}"
            f"{each.memory_bandwidth / 1e9:11.0f}{within:10.0f}{between:9.0f}{each.devices_per_node:9}"
        )
    return OK


def run_show(parsed: argparse.Namespace) -> int:
    """Print one description with the comments of its file, and return the exit status.

    Raises:
        UsageError: It is neither a preset nor a valid file.
    """
    hardware = _load(parsed.name)
    if parsed.json:
        print_json(hardware_to_table(hardware))
        return OK
    path = Path(parsed.name) if parsed.name.endswith(".toml") else PRESETS / f"{parsed.name.lower()}.toml"
    print(path.read_text(encoding="utf-8").rstrip())
    return OK


def run_measure(parsed: argparse.Namespace) -> int:
    """Measure this machine, print or write the description, and return the exit status.

    Raises:
        UsageError: ``--like`` is unknown, there is no such device, or the file cannot be written.
    """
    if parsed.ranks is not None and parsed.ranks < 2:
        raise UsageError(f"--ranks {parsed.ranks} must be at least 2")
    if parsed.output is not None and not parsed.output.resolve().parent.is_dir():
        raise UsageError(f"--output {parsed.output}: there is no folder {parsed.output.parent}")
    like = None if parsed.like is None else _load(parsed.like)
    from lightning_hybrid.cli.hardware.measure_machine import measure_machine

    name = "this machine" if parsed.output is None else parsed.output.stem
    with usage_errors():
        hardware, notes = measure_machine(name, device=parsed.device, num_ranks=parsed.ranks, like=like)
    if parsed.output is not None:
        try:
            parsed.output.write_text(hardware_to_toml(hardware, notes), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output: {error}") from error
    if parsed.json:
        print_json(hardware_to_table(hardware))
    elif parsed.output is None:
        print(hardware_to_toml(hardware, notes), end="")
    else:
        print(f"wrote {parsed.output}: use --hardware {parsed.output}")
    return OK


def _load(name: str) -> Hardware:
    with usage_errors():
        return load_hardware(name)
