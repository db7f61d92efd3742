"""Memory check: whether one rank has room for a full copy of a module and its gradients."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.text import sized

_LIMITS = (  # of the container that this process runs in: its limit, its usage, and what that consists of
    tuple(f"/sys/fs/cgroup/{name}" for name in ("memory.max", "memory.current", "memory.stat")),
    tuple(f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
)
# Cached files, which usage includes and the system drops where memory is short; names of cgroup v2, and of v1.
_FILE_CACHE = re.compile(r"^(?:total_)?(?:in)?active_file (\d+)$", re.MULTILINE)


def memory_shortage(parameters: Iterable[Tensor], device: torch.device, activation_bytes: float) -> str:
    """Say in one sentence how much memory a full copy lacks; empty if it fits, or if the system reports no limit.

    Parameters have their full shapes; those of other ranks are absent. ``activation_bytes`` are one microbatch's.
    """
    sizes = [(p.numel() * p.element_size(), is_absent(p)) for p in parameters]
    total = float(sum(size for size, _ in sizes))
    # Parameters of other ranks, gradients, and their copies for the transfer to the host.
    on_device = sum(size for size, absent in sizes if absent) + 2 * total + activation_bytes
    # The weights, and both sets of gradients.
    on_host = 3 * total
    if device.type == "cpu":
        on_device, on_host = 0.0, on_host + on_device
    for where, needed, free in (
        (str(device), on_device, math.inf if device.type == "cpu" else free_bytes(device)),
        ("the host", on_host, free_on_host()),
    ):
        if needed > free:
            return (
                f"verify_first_step=True needs about {sized(needed)} on {where} of the first rank, for the"
                f" full module, its gradients and one microbatch, and {sized(free)} are free"
            )
    return ""


def free_bytes(device: torch.device) -> float:
    """Bytes that this process can still allocate for tensors on a device."""
    if device.type != "cuda":
        return free_on_host() if device.type == "cpu" else math.inf
    free, total = torch.cuda.mem_get_info(device)
    share = total * torch.cuda.get_per_process_memory_fraction(device)
    return float(min(free + torch.cuda.memory_reserved(device), share) - torch.cuda.memory_allocated(device))


def free_on_host() -> float:
    """Bytes that this process can still allocate on the host; infinity where the system does not say."""
    free = math.inf
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = float(line.split()[1]) * 1024
    except OSError:
        pass
    for limit, usage, statistics in _LIMITS:
        try:
            cached = _cached_files(Path(statistics).read_text())
            free = min(free, float(Path(limit).read_text()) - float(Path(usage).read_text()) + cached)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return free


def _cached_files(statistics: str) -> float:
    """Return the bytes of cached files of a control group and its children."""
    lines = [line for line in statistics.splitlines() if line.startswith("total_")] or statistics.splitlines()
    return float(sum(int(size) for size in _FILE_CACHE.findall("\n".join(lines))))


def host_memory() -> float:
    """Bytes of memory of the host, or of the container that this process runs in; infinity where unknown."""
    size = math.inf
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on this system
        size = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit, *_ in _LIMITS:
        try:
            size = min(size, float(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return size
