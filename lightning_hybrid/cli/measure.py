"""A description of this machine by measurement: its device, its host, and the links between local ranks."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.cli.env import usable_cores
from lightning_hybrid.predict.hardware import BandwidthCurve, Hardware
from lightning_hybrid.verify.ranks import run_ranks

# Seconds that one measurement repeats for; the fastest repetition counts, because others only disturb it.
_BUDGET = 0.5
# The square products to time; a larger one only if the smaller one took less than the budget.
_PRODUCTS = {"cpu": (256, 1024), "cuda": (1024, 8192)}
_DTYPES = ("float32", "bfloat16", "float16")
_MESSAGES = [2**exponent for exponent in range(12, 27, 2)]


def measure_machine(
    name: str, *, device: str | None = None, num_ranks: int | None = None, like: Hardware | None = None
) -> tuple[Hardware, list[str]]:
    """Measure this machine.

    Args:
        name: Of the description.
        device: "cuda" or "cpu"; a GPU if there is one, if None.
        num_ranks: Local ranks between which all-reduces are measured; all GPUs, or 2, if None.
        like: Gives what cannot be measured on one machine: the links between nodes, and devices per node.

    Returns:
        The description, and notes on what was measured.

    Raises:
        ValueError: There is no such device, or fewer GPUs than ranks.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU; use --device cpu")
    num_devices = torch.cuda.device_count() if kind == "cuda" else usable_cores()
    ranks = num_ranks or (num_devices if kind == "cuda" else 2)
    if kind == "cuda" and ranks > num_devices:
        raise ValueError(f"--ranks {ranks}: there are {num_devices} GPUs")
    notes = [f"Measured on {platform.node() or 'this machine'}, {_device_name(kind)}, PyTorch {torch.__version__}."]
    host_bandwidth = _copy_bandwidth(kind, to_host=True)
    memory, reserved = _memory(kind, num_devices)
    if ranks > 1:
        links, resident = _measure_links(kind, ranks)
        notes.append(f"Links within a node: all-reduce of {ranks} ranks over {'NCCL' if kind == 'cuda' else 'gloo'}.")
        reserved = max(reserved, resident)
    else:
        links = BandwidthCurve((1e6, 1e9), (host_bandwidth, host_bandwidth))
        notes.append("Links within a node were not measured: there is one GPU. Their bandwidth is that of its host.")
    notes.append(f"Links between nodes are those of {like.name}." if like else "Links between nodes: as within one.")
    latency = links.sizes[0] / links.bandwidths[0]
    product_flops = _product_flops(kind)
    return Hardware(
        name=name,
        memory=memory,
        reserved=reserved,
        product_flops=product_flops,
        memory_bandwidth=2 * _copy_bandwidth(kind, to_host=False),
        kernel_seconds=_kernel_seconds(kind),
        efficiency=dict.fromkeys(product_flops, 1.0),
        devices_per_node=like.devices_per_node if like else num_devices,
        within_node=links,
        between_nodes=like.between_nodes if like else links,
        latency_within=latency,
        latency_between=like.latency_between if like else latency,
        overlap=like.overlap if like else float(kind == "cuda"),
        host_bandwidth=host_bandwidth,
        host_update_rate=_host_update_rate(),
        is_host=kind == "cpu",
        host_memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    ), notes


def _least_seconds(run: Callable[[], Any], kind: str) -> float:
    """Seconds of the fastest of several runs, the first one not counted."""
    run()
    least, end = float("inf"), time.monotonic() + _BUDGET
    while True:
        _wait(kind)
        start = time.perf_counter()
        run()
        _wait(kind)
        least = min(least, time.perf_counter() - start)
        if time.monotonic() > end:
            return least


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _product_flops(kind: str) -> dict[str, float]:
    """Largest FLOP/s of a square matrix product, by the number formats that the device has."""
    rates = {name: _rate(getattr(torch, name), kind) for name in _DTYPES}
    if kind == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        rates["float8"] = _rate(torch.float8_e4m3fn, kind)
    return rates


def _rate(dtype: torch.dtype, kind: str) -> float:
    best, one = 0.0, torch.ones((), device=kind)
    for size in _PRODUCTS[kind]:
        left, right = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))

        def multiply(left: Tensor = left, right: Tensor = right) -> Tensor:
            if left.dtype.itemsize > 1:
                return left @ right
            return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        seconds = _least_seconds(multiply, kind)
        best = max(best, 2.0 * size**3 / seconds)
        if seconds * (_PRODUCTS[kind][-1] / size) ** 3 > _BUDGET:
            break
    return best


def _copy_bandwidth(kind: str, *, to_host: bool) -> float:
    """Bytes per second that one copy moves, within the device's memory or from it to pinned memory of the host."""
    size = 2**28 if kind == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=kind)
    if kind == "cuda" and to_host:
        target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    else:
        target = torch.empty_like(source)
    return size / _least_seconds(lambda: target.copy_(source, non_blocking=True), kind)


def _kernel_seconds(kind: str) -> float:
    """Seconds between the starts of two small kernels."""
    number, small = 1000, torch.ones(1, device=kind)

    def start_all() -> None:
        for _ in range(number):
            small.add_(1)

    return _least_seconds(start_all, kind) / number


def _host_update_rate() -> float:
    """Parameters per second that AdamW updates on the host."""
    parameter = torch.nn.Parameter(torch.zeros(2**22))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return parameter.numel() / _least_seconds(optimizer.step, "cpu")


def _measure_links(kind: str, ranks: int) -> tuple[BandwidthCurve, float]:
    """Return bus bandwidth against size between local ranks, and the bytes that a rank takes without tensors."""
    seconds, resident = run_ranks(ranks, _time_all_reduces, kind, timeout=120.0)[0]
    share = 2 * (ranks - 1) / ranks
    rates = [share * size / each for size, each in zip(_MESSAGES, seconds, strict=True)]
    return BandwidthCurve(tuple(map(float, _MESSAGES)), tuple(rates)), resident


def _time_all_reduces(kind: str) -> tuple[list[float], float]:
    """Run on each rank: seconds of an all-reduce of each size, the fastest of ten; bytes of this process."""
    rank = int(os.environ["RANK"])
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    before = _own_bytes(kind)
    seconds = []
    for size in _MESSAGES:
        message, least = torch.ones(size, dtype=torch.uint8, device=kind), float("inf")
        for _ in range(10):
            dist.barrier()
            _wait(kind)
            start = time.perf_counter()
            dist.all_reduce(message)
            _wait(kind)
            least = min(least, time.perf_counter() - start)
        slowest = torch.tensor(least, dtype=torch.float64, device=kind)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    dist.destroy_process_group()
    return seconds, before


def _memory(kind: str, num_devices: int) -> tuple[float, float]:
    """Bytes of a device, and how many of them the framework takes."""
    if kind == "cuda":
        torch.ones(1, device=kind)
        return float(torch.cuda.get_device_properties(0).total_memory), _own_bytes(kind)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / num_devices, 0.0


def _own_bytes(kind: str) -> float:
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free - torch.cuda.memory_reserved())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _device_name(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else f"{usable_cores()} cores"
