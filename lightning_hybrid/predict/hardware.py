"""`Hardware`: what one device computes and holds, and what the links carry; read from TOML."""

from __future__ import annotations

import bisect
import difflib
import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


PRESETS = Path(__file__).with_name("presets")
_FLAGS = ("is_host", "direct_links")
_SHARES = ("efficiency", "attention")
# Of products in 16 bits, what FlashAttention reaches where a file does not say.
_ATTENTION = {"flash2": 0.6}
_FLOPS = "FLOP/s by number format, such as { float32 = 1e12 }"
_TABLES = {
    "product_flops": _FLOPS,
    "peak_flops": _FLOPS,
    "attention": "shares by kernel, such as { flash2 = 0.6 }",
}
_LINKS = ("within_node", "between_nodes")
# What a file may leave out. The efficiency is the H100's, 64 % of 989 TFLOP/s of its data sheet, and the
# overlap what all devices since the A100 have.
_DEFAULTS: Mapping[str, Any] = {
    "reserved": 1.5e9,
    "kernel_seconds": 4e-6,
    "efficiency": 0.64,
    "devices_per_node": 8,
    "latency_within": 1e-5,
    "latency_between": 2.5e-5,
    "overlap": 0.8,
    "host_bandwidth": 25e9,
    "host_update_rate": 1e9,
}
_SIZES = tuple(4.0**power for power in range(7, 17))  # of messages, where a link is given by one number
_MAY_BE_ZERO = ("reserved", "kernel_seconds", "latency_within", "latency_between", "overlap")


@dataclass(frozen=True)
class BandwidthCurve:
    """Bus bandwidth of a collective against the bytes of its tensor, interpolated between measured points."""

    sizes: tuple[float, ...]  # bytes of the full tensor, ascending
    # bus bandwidth in bytes per second at each, as nccl-tests define it: what the busiest link carries
    bandwidths: tuple[float, ...]

    def bandwidth(self, size: float) -> float:
        """Bytes per second at a size: constant time below the first point, log-log between, constant above the last."""
        if size <= self.sizes[0]:
            return self.bandwidths[0] * max(size, 1.0) / self.sizes[0]
        if size >= self.sizes[-1]:
            return self.bandwidths[-1]
        right = bisect.bisect_left(self.sizes, size)
        left = right - 1
        share = math.log(size / self.sizes[left]) / math.log(self.sizes[right] / self.sizes[left])
        return self.bandwidths[left] * (self.bandwidths[right] / self.bandwidths[left]) ** share


@dataclass(frozen=True)
class Hardware:
    """One kind of device in one kind of cluster.

    Attributes:
        name: Name of the preset or of the file.
        memory: Bytes of a device.
        reserved: Bytes that the framework, its libraries and fragmentation take of these.
        product_flops: Largest measured FLOP/s of a matrix product, by number format ("bfloat16", "float8", ...).
        memory_bandwidth: Bytes per second of the device's memory.
        kernel_seconds: Least time between the starts of two kernels.
        efficiency: Share of ``product_flops`` that products in a training step reach, by number format; a file may give
            one number for all.
        devices_per_node: Devices that share the links within a node.
        within_node: Bus bandwidth between all devices of a node.
        between_nodes: Bus bandwidth per node over all its adapters, when all its devices take part.
        latency_within: Seconds of one message within a node.
        latency_between: The same between nodes.
        overlap: Share of a collective's time that computation beside it hides: near 1 where adapters read the devices'
            memory, 0 where the host drives them (Omni-Path).
        host_bandwidth: Bytes per second between a device and its host, in one direction.
        host_update_rate: Parameters per second and device that an optimizer on the host updates.
        host_memory: Bytes of a node's host, of which offload may take what the devices of the node need together.
        is_host: Whether the devices are the host's own cores, so that nothing is offloaded to it.
        direct_links: Whether each device of a node has links of its own to each other one, without a switch: n of N
            devices then use ``(n - 1) / (N - 1)`` of their links.
        peak_flops: FLOP/s of the data sheet, without sparsity, by number format, for MFU alone; ``product_flops`` where
            they are left out.
        attention: Share of the rate of products in 16 bits that the forward of fused attention reaches, by its kernel
            ("flash2", "cudnn"); the first is the one that PyTorch takes.
        assumed: Names of what the file does not give, for which there is a default.
        limit: Bytes of a device that a user permits.
    """

    name: str
    memory: float
    reserved: float
    product_flops: Mapping[str, float]
    memory_bandwidth: float
    kernel_seconds: float
    efficiency: Mapping[str, float]
    devices_per_node: int
    within_node: BandwidthCurve
    between_nodes: BandwidthCurve
    latency_within: float
    latency_between: float
    overlap: float
    host_bandwidth: float
    host_update_rate: float
    is_host: bool = False
    direct_links: bool = False
    host_memory: float = math.inf
    attention: Mapping[str, float] = field(default_factory=lambda: dict(_ATTENTION))
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    limit: float = math.inf

    def product_rate(self, number_format: str) -> float:
        """Return the FLOP/s of large products of a training step; of those in 32 bits, if the format is unknown."""
        name = number_format if number_format in self.product_flops else "float32"
        return self.product_flops[name] * self.efficiency.get(name, 1.0)

    def peak(self, number_format: str) -> float:
        """FLOP/s of the data sheet, or of the largest measured product where the file has none."""
        return self.peak_flops.get(number_format) or self.product_flops.get(number_format, math.inf)


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """Read a preset, or a TOML file by its path.

    Args:
        name: Of a preset such as "a100-80", or the path of a file.

    Raises:
        ValueError: Neither a preset nor a file, no TOML, a key is missing or unknown, or a value is impossible.
    """
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name.lower()}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise ValueError(f"there is no file {name!r}; presets are {', '.join(preset_names())}")
        near = [each for each in preset_names() if name and each.startswith(name.lower())]
        near = near or difflib.get_close_matches(name.lower(), preset_names())
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        names = ", ".join(preset_names())
        raise ValueError(f"no hardware {name!r}: give one of {names}, or the path of a TOML file{meant}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error
    return hardware_from_table(table, path)


def hardware_from_table(table: Mapping[str, Any], path: Path) -> Hardware:
    """Build a `Hardware` from the table of a TOML file.

    Raises:
        ValueError: A key is missing or unknown, or a value is impossible.
    """
    wanted = set(Hardware.__dataclass_fields__) - {"assumed", "limit"}
    optional = {*_FLAGS, "host_memory", "attention", "peak_flops", "sources"}
    given = with_defaults(table)
    given.setdefault("name", path.stem)
    missing, unknown = wanted - set(given) - optional, set(given) - wanted - optional
    if missing or unknown:
        raise ValueError(f"{path}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
    given.pop("sources", None)
    _check_values(given, path)
    if not isinstance(given["efficiency"], Mapping):
        given["efficiency"] = dict.fromkeys(given["product_flops"], given["efficiency"])
    for link in _LINKS:
        points: Sequence[Sequence[float]] = sorted(given[link])
        given[link] = BandwidthCurve(tuple(size for size, _ in points), tuple(rate for _, rate in points))
    given["devices_per_node"] = int(given["devices_per_node"])
    return Hardware(**given, assumed=tuple(name for name in _DEFAULTS if name not in table))


def with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a file that may give no more than products, memory and bandwidths, with all the rest.

    Where ``efficiency`` is left out, ``product_flops`` are those of a data sheet. A single number for a link is the bus
    bandwidth of large messages.
    """
    given: dict[str, Any] = {**_DEFAULTS, **table}
    if "reserved" not in table and _is_number(given.get("memory")):
        given["reserved"] = min(_DEFAULTS["reserved"], 0.05 * given["memory"])
    rates = given.get("product_flops")
    if isinstance(rates, Mapping) and rates and "float32" not in rates and all(map(_is_number, rates.values())):
        given["product_flops"] = {**rates, "float32": min(rates.values()) / 16}  # as of an A100 or an H100
    for link, latency in zip(_LINKS, ("latency_within", "latency_between"), strict=True):
        rate: Any = given.get(link)
        if _is_number(rate) and rate > 0 and _is_number(given[latency]):
            given[link] = [[size, size / (given[latency] + size / rate)] for size in _SIZES]
    return given


def _check_values(table: Mapping[str, Any], path: Path) -> None:
    """Refuse values that are no numbers, negative, or 0 where a rate or a size is needed."""
    tables = [name for name in ("product_flops", "peak_flops", *_SHARES) if isinstance(table.get(name), Mapping)]
    others = ("name", *_FLAGS, *tables, *_LINKS)
    single = {name: value for name, value in table.items() if name not in others}
    for flag in _FLAGS:
        if not isinstance(table.get(flag, False), bool):
            raise ValueError(f"{path}: {flag}={table[flag]!r}; use true or false")
    for name, words in _TABLES.items():
        if name in table and (not isinstance(table[name], Mapping) or not table[name]):
            raise ValueError(f"{path}: {name}={table[name]!r}; use {words}")
    entries = {f"{name}.{key}": value for name in tables for key, value in table[name].items()}
    for name, value in {**single, **entries}.items():
        may_be_zero = name in _MAY_BE_ZERO
        if not _is_number(value) or value < 0 or (value == 0 and not may_be_zero):
            raise ValueError(f"{path}: {name}={value!r}; use a number {'of 0 or more' if may_be_zero else 'above 0'}")
    if not isinstance(table["name"], str):
        raise ValueError(f"{path}: name={table['name']!r}; use text in quotes")
    if table["devices_per_node"] != int(table["devices_per_node"]):
        raise ValueError(f"{path}: devices_per_node={table['devices_per_node']!r}; use a whole number")
    for name in _LINKS:
        points = table[name]
        if not isinstance(points, Sequence) or not points or not all(map(_is_point, points)):
            raise ValueError(f"{path}: {name} needs pairs of bytes and bytes per second above 0, such as [[1e6, 1e9]]")
        if len({size for size, _ in points}) < len(points):
            raise ValueError(f"{path}: {name} has two bandwidths for the same number of bytes")


def _is_point(point: Any) -> bool:
    return isinstance(point, list) and len(point) == 2 and all(_is_number(each) and each > 0 for each in point)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def processor_name() -> str:
    """Return the name of the processor of this host."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        found = None
    return found[1] if found else platform.processor() or platform.machine()
