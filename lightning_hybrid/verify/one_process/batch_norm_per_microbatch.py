"""BatchNorm of a full batch with the statistics of its microbatches, while all else is that of the full batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.patching import around
from lightning_hybrid.step.batch.split_batch_into_microbatches import sizes_of


def known_sizes(microbatches: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of samples of each microbatch; empty where one is unknown."""
    sizes = sizes_of(microbatches)
    return tuple(size for size in sizes if size is not None) if None not in sizes else ()


@contextlib.contextmanager
def batch_norm_per_microbatch(module: nn.Module, sizes: Sequence[int]) -> Iterator[None]:
    """Let the BatchNorm layers of a module normalise the samples of each microbatch separately, one after the other.

    Args:
        module: Its layers in training mode are concerned.
        sizes: Samples of each microbatch; nothing is changed if there are fewer than two.
    """
    with contextlib.ExitStack() as undo:
        for layer in module.modules() if len(sizes) > 1 else ():
            if isinstance(layer, _BatchNorm):
                undo.callback(around(layer, "forward", partial(_in_chunks, layer, sizes), reason="the reference"))
        yield


def _in_chunks(layer: nn.Module, sizes: Sequence[int], original: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Normalise ``rows`` of shape (samples * k, ...), where each microbatch has its samples' k rows."""
    per_sample, rest = divmod(len(rows), sum(sizes))
    if not layer.training or rest:
        return original(rows)
    return torch.cat([original(chunk) for chunk in rows.split([size * per_sample for size in sizes])])
