"""BatchNorm of a full batch with the statistics of its microbatches, while all else is that of the full batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.patching import around


def is_batch_norm(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm of torch."""
    return isinstance(layer, _BatchNorm)


@contextlib.contextmanager
def batch_norm_per_microbatch(module: nn.Module, sizes: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let the BatchNorm layers of a module normalise the samples of each microbatch separately, one after the other.

    Running statistics are those of the first replica, as under DDP.

    Args:
        module: Its layers in training mode are concerned.
        sizes: Samples of each microbatch, by replica; nothing is changed if there are fewer than two.
    """
    with contextlib.ExitStack() as undo:
        for layer in module.modules() if sum(map(len, sizes)) > 1 else ():
            if is_batch_norm(layer):
                undo.callback(around(layer, "forward", partial(_in_chunks, layer, sizes), reason="the reference"))
        yield


def _in_chunks(
    layer: nn.Module, sizes: Sequence[Sequence[int]], original: Callable[[Tensor], Tensor], rows: Tensor
) -> Tensor:
    """Normalise ``rows`` of shape (samples * k, ...), where each microbatch has its samples' k rows."""
    per_sample, rest = divmod(len(rows), sum(map(sum, sizes)))
    if not layer.training or rest:
        return original(rows)
    chunks = iter(rows.split([size * per_sample for own in sizes for size in own]))
    outputs = [original(next(chunks)) for _ in sizes[0]]
    after = [buffer.clone() for buffer in layer.buffers()]
    outputs += [original(chunk) for chunk in chunks]
    for buffer, value in zip(layer.buffers(), after, strict=True):
        buffer.data.copy_(value)  # not a write that autograd sees
    return torch.cat(outputs)
