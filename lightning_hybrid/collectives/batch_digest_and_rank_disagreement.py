"""Agreement of the ranks of a replica: digests by which they compare batches, and the error where they differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hybrid.errors import RanksDisagree
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import as_plain_tensor

_DIGESTED = 4096  # elements used per tensor, about


def batches_differ(checksums: Sequence[float]) -> RanksDisagree:
    """The error for ranks of one replica whose batches have these different checksums, by rank."""
    return RanksDisagree(
        f"the batch differs between the ranks of one replica (checksums {checksums} on pipeline ranks 0 to"
        f" {len(checksums) - 1}); every rank must draw the same samples: call seed_everything(...) before random data"
        " are generated, and seed samplers and augmentation without the rank",
        entry="batch-differs",
    )


def digest(leaves: Sequence[object]) -> int:
    """A number that is equal for equal batches, and almost surely for no others; cheap on large tensors."""
    total = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided:
            flat = as_plain_tensor(leaf).detach().reshape(-1)
            part = flat[:: max(1, flat.numel() // _DIGESTED)].contiguous()
            if part.is_complex() or part.is_conj():
                part = torch.view_as_real(part.resolve_conj())
            content = part.view(torch.uint8).cpu().numpy().tobytes()
            total = hash((total, tuple(leaf.shape), zlib.crc32(content)))
        elif isinstance(leaf, int | float):
            total = hash((total, leaf))
        elif inside := [] if isinstance(leaf, Tensor) else tensors_inside(leaf):
            total = hash((total, digest(inside)))
    return total & 0xFFFFFFFFFFFF  # exact in float64
