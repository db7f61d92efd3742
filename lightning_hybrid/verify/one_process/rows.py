"""Rows of a full batch as in the microbatches that they belong to: their random numbers, and BatchNorm's statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.patching import around
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.tracing.instrument import draw_as_stages
from lightning_hybrid.verify.one_process.pieces import Piece


@contextlib.contextmanager
def rows_of_pieces(
    module: nn.Module,
    randomness: KeyedRandomness | None,
    number: int,
    pieces: Sequence[Piece],
    *,
    batch_norm: bool = True,
) -> Iterator[None]:
    """Context of a step on the samples of these pieces, one after the other.

    Args:
        module: The user's module.
        randomness: Keys the random numbers of each microbatch; None leaves the generators alone.
        number: Of the step.
        pieces: Of one replica each.
        batch_norm: Whether BatchNorm takes its statistics per microbatch.
    """
    sizes = [piece.sizes for piece in pieces] if all(piece.sizes for piece in pieces) else []
    flat = [size for each in sizes for size in each]
    numbers = [each for piece in pieces for each in piece.numbers] if len(flat) > 1 else []
    with contextlib.ExitStack() as stack:
        if randomness is not None:
            stack.enter_context(draw_as_stages(module, randomness, number, pieces[0].number))
            stack.enter_context(randomness.rows_of_microbatches(number, numbers, flat if numbers else []))
        for layer in module.modules() if batch_norm and len(flat) > 1 else ():
            if is_batch_norm(layer):
                stack.callback(around(layer, "forward", partial(_in_chunks, layer, sizes), reason="the reference"))
        yield


def is_batch_norm(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm of torch."""
    return isinstance(layer, _BatchNorm)


def _in_chunks(
    layer: nn.Module, sizes: Sequence[Sequence[int]], original: Callable[[Tensor], Tensor], rows: Tensor
) -> Tensor:
    """Normalise ``rows`` of shape (samples * k, ...), where each microbatch has its samples' k rows.

    Running statistics are those of the first replica, as under DDP.
    """
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
