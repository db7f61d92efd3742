"""The subcommands ``hardware list``, ``hardware show NAME`` and ``hardware measure``; the first two import no torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import OK, UsageError, add_command, print_json, usage_errors, write_text
from lightning_hybrid.predict.hardware import PRESETS, BandwidthCurve, Hardware, load_hardware, preset_names
from lightning_hybrid.text import columns

_EXAMPLE = """example:
  lightning-hybrid hardware {}

exit status: 0 ok{}"""
_MAY_FAIL = "; 2 invalid command line, or an unknown name"


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "hardware",
        None,
        text="describe devices and links for the planner: presets, or measured here",
        description="Lists and shows the descriptions of hardware that the planner reads, and measures this machine.",
        example=_EXAMPLE.format("list\n  lightning-hybrid hardware measure --output mine.toml", _MAY_FAIL),
    )
    actions = parser.add_subparsers(dest="subcommand", required=True)
    listed = {"text": "presets in a table", "description": "Lists the presets.", "example": _EXAMPLE.format("list", "")}
    add_command(actions, "list", run_list, **listed)
    shown = add_command(
        actions,
        "show",
        run_show,
        text="one description",
        description="Prints one description as TOML.",
        example=_EXAMPLE.format("show h100", _MAY_FAIL),
    )
    shown.add_argument("name", help="of a preset, or the path of a TOML file")
    measured = add_command(
        actions,
        "measure",
        run_measure,
        text="measure this machine",
        description="Measures this machine in less than a minute: matrix products by number format, memory, starts of"
        " kernels, copies to the host, an optimizer on the host, and all-reduces between local ranks over NCCL or gloo."
        " Prints the description as TOML. Run it while nothing else runs.",
        example=_EXAMPLE.format("measure --output mine.toml", _MAY_FAIL),
    )
    measured.add_argument("--output", type=Path, metavar="FILE", help="write the TOML file instead of printing it")
    measured.add_argument("--like", metavar="NAME", help="preset or file that gives the links between nodes")
    measured.add_argument("--device", choices=("cuda", "cpu"), help="(the GPU if there is one)")
    measured.add_argument("--ranks", type=int, help="ranks between which links are measured (every GPU, or 2)")


def run_list(parsed: argparse.Namespace) -> int:
    """Print a row for each preset, and return the exit status."""
    presets = [load_hardware(name) for name in preset_names()]
    if parsed.json:
        print_json({each.name: hardware_to_table(each) for each in presets})
        return OK
    rows: list[tuple[str, ...]] = [
        ("name", "memory", "products", "memory", "in node", "node", "devices"),
        ("", "GB", "TFLOP/s", "GB/s", "GB/s", "GB/s", "in node"),
    ]
    for each in presets:
        dtype, flops = max(each.product_flops.items(), key=lambda item: (item[0] != "float32", item[1]))
        rates = each.memory_bandwidth, *(max(curve.bandwidths) for curve in (each.within_node, each.between_nodes))
        cells = f"{each.memory / 1e9:.1f}", f"{dtype} {flops / 1e12:g}", *(f"{rate / 1e9:.0f}" for rate in rates)
        rows.append((each.name, *cells, str(each.devices_per_node)))
    print("\n".join(columns(rows, right=1)))
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
    from lightning_hybrid.cli.measure import measure_machine

    name = "this machine" if parsed.output is None else parsed.output.stem
    with usage_errors():
        hardware, notes = measure_machine(name, device=parsed.device, num_ranks=parsed.ranks, like=like)
    if parsed.output is not None:
        write_text(parsed.output, hardware_to_toml(hardware, notes), "--output")
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


# -- a description as a TOML file, the inverse of `load_hardware` ------------------------------------------------------


def hardware_to_table(hardware: Hardware) -> dict[str, Any]:
    """Return the keys of a TOML file as plain values; curves are lists of pairs of bytes and bytes per second."""
    table = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)}
    left_out = {"assumed", "limit", *(name for name in ("host_memory", "peak_flops") if table[name] in (math.inf, {}))}
    return {name: _plain(value) for name, value in table.items() if name not in left_out}


def hardware_to_toml(hardware: Hardware, notes: Sequence[str] = ()) -> str:
    """Return the text of a TOML file."""
    lines = [f"# {note}" for note in notes]
    lines += [f"{name} = {_toml(value)}" for name, value in hardware_to_table(hardware).items()]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, BandwidthCurve):
        return [[round(size), rate] for size, rate in zip(value.sizes, value.bandwidths, strict=True)]
    return dict(value) if isinstance(value, Mapping) else value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, float):
        return f"{value:.4g}" if "." in f"{value:.4g}" or "e" in f"{value:.4g}" else f"{value:.1f}"
    return json.dumps(value)
