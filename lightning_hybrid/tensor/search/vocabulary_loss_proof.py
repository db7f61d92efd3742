"""The proof that a vocabulary-parallel cross entropy equals that of the full logits.

Units are proved by themselves, and the loss is often in none of them. So this is done once for each size of a
vocabulary, with a tied weight: it is both looked up and multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.parts.parameter_shard_placement import Shard, join, shard_tensor
from lightning_hybrid.tensor.trial.sharded_unit_proof import TOLERANCE
from lightning_hybrid.tensor.trial.threaded_ranks import ThreadRanks, TrialFailed, on_ranks
from lightning_hybrid.tensor.vocabulary.vocabulary_ranges_and_local_shard import Vocabulary
from lightning_hybrid.tensor.vocabulary.vocabulary_tensor import represent

_WIDTH, _POSITIONS = 5, (3, 7)
_MAX_ROWS = 97


def cross_entropy_failure(length: int, size: int) -> str | None:
    """Compares a vocabulary-parallel cross entropy of random float64 numbers; returns what is wrong, or None.

    Args:
        length: Rows of the vocabulary; a large one is replaced by a small one that is as uneven.
        size: Number of tensor ranks.
    """
    rows = length if length <= _MAX_ROWS * size else _MAX_ROWS * size + length % size
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    weight, bias, x = random(rows, _WIDTH), random(rows), random(*_POSITIONS, _WIDTH)
    tokens = torch.linspace(0, rows - 1, x[..., 0].numel()).long().view(_POSITIONS)
    targets = tokens.flip(0).clone()
    targets[0, 0] = targets[2, 3] = -100
    expected = _run(weight, bias, x, tokens, targets, None)

    def one(ranks: ThreadRanks) -> list[Tensor]:
        vocabulary = Vocabulary(rows, ranks)
        local = [shard_tensor(full, vocabulary.shard(0), ranks.rank, size) for full in (weight, bias)]
        return _run(local[0], local[1], x, tokens, targets, vocabulary)

    try:
        outcomes = on_ranks(size, one)
    except TrialFailed as failure:
        return str(failure)
    placement = Shard.unevenly(0, rows, size)
    for index, (name, wanted) in enumerate(zip(_NAMES, expected, strict=True)):
        each = [outcome[index] for outcome in outcomes]
        for found in [join(each, placement)] if "row" in name else each:
            distance = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
            if not distance <= TOLERANCE:
                return f"{name} of a vocabulary-parallel cross entropy: relative difference {distance:.1e}"
    return None


_NAMES = ("loss", "smoothed loss", "largest", "gradient of rows", "gradient of the rows' biases", "gradient of inputs")


def _run(
    weight: Tensor, bias: Tensor, x: Tensor, tokens: Tensor, targets: Tensor, vocabulary: Vocabulary | None
) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (weight, bias, x)]
    rows, row_biases, x = inputs
    if vocabulary is not None:
        rows, row_biases = represent(rows, 0, vocabulary), represent(row_biases, 0, vocabulary)
    logits = F.linear(F.embedding(tokens, rows) * 0.5 + x, rows, row_biases)
    shifted = logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(shifted, targets[:, 1:].flatten())
    smooth = F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1, reduction="sum")
    largest = logits.argmax(-1).double()
    return [loss.detach(), smooth.detach(), largest, *torch.autograd.grad(loss + smooth, inputs)]
