"""The choice of a process group's backend, and the share of a device's memory for each of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_hybrid.gloo_via_host.process_group import BACKEND, GlooViaHost


def choose_backend(requested: str | None, device: torch.device, num_ranks: int) -> str | None:
    """Return the backend for ranks on a device; None for torch's own choice. Registers it with torch.distributed.

    Args:
        requested: By the user.
        device: Of this rank.
        num_ranks: Ranks of this node that have the device.

    Raises:
        ValueError: NCCL is requested for several ranks on one device.
    """
    if device.type != "cuda":
        return requested
    if requested not in (None, "gloo", BACKEND):
        if num_ranks > 1 and "nccl" in requested.lower():
            raise ValueError(
                f"{num_ranks} ranks share {device}, and process_group_backend={requested!r}: NCCL communicates between"
                " devices alone; leave process_group_backend out, or set ranks_per_device=1"
            )
        return requested
    if requested is None and num_ranks == 1:
        return None
    register_backend()
    return BACKEND


def register_backend() -> None:
    """Make the backend known to torch.distributed; a second call changes nothing."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, GlooViaHost, devices=["cuda"])


def limit_memory(device: torch.device, num_ranks: int) -> None:
    """Limit this process to its share of a CUDA device that several ranks have, so that none takes that of others."""
    if device.type == "cuda" and num_ranks > 1:
        torch.cuda.set_per_process_memory_fraction(1 / num_ranks, device)


def describe_sharing(devices: Sequence[torch.device], device: torch.device, backend: str) -> list[str]:
    """Return the line on the ranks that share a CUDA device; none where each rank has its own.

    Args:
        devices: Of the ranks of this node.
        device: Of this rank.
        backend: Of the process groups.
    """
    count = devices.count(device)
    if device.type != "cuda" or (count <= 1 and backend != BACKEND):
        return []
    why = f"{count} ranks share {device}" if count > 1 else "process_group_backend='gloo'"
    return [f"{why}; communication goes over the host (gloo), which is for tests: it is much slower than NCCL"]
