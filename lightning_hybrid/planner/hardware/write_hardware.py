"""A description of hardware as a TOML file, the inverse of `load_hardware`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hybrid.planner.hardware.hardware import BandwidthCurve, Hardware


def hardware_to_table(hardware: Hardware) -> dict[str, Any]:
    """Return the keys of a TOML file as plain values; curves are lists of pairs of bytes and bytes per second."""
    table = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)}
    return {name: _plain(value) for name, value in table.items()}


def hardware_to_toml(hardware: Hardware, notes: Sequence[str] = ()) -> str:
    """Return the text of a TOML file.

    Args:
        hardware: What to write.
        notes: Lines of comments at its top.
    """
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
