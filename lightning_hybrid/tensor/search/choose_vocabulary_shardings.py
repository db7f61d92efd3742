"""The choice of the weights that are sharded by vocabulary, from their uses in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

from lightning_hybrid.step.standins.absent_tensors import full_shape
from lightning_hybrid.tensor.discovery.vocabulary_uses import WeightUse

# A table with so many times fewer rows than the largest one (positions, token types) is not worth an all-reduce.
_SMALL_TABLE_FACTOR = 8
# Shards of different sizes need so many rows for each rank.
_UNEVEN_ROWS = 4


@dataclass(frozen=True)
class VocabularySharding:
    """The vocabulary sharding of one weight.

    Attributes:
        dim: The dim that is sharded.
        outside: Whether code outside of its units uses it too.
        is_head: Whether it is multiplied by to make logits, or added to them.
    """

    dim: int
    outside: bool
    is_head: bool


def choose_vocabulary_shardings(
    root: nn.Module, uses: Mapping[str, WeightUse], size: int
) -> tuple[dict[str, VocabularySharding], dict[str, str]]:
    """Chooses the parameters to shard by vocabulary over `size` tensor ranks, from their uses in the step.

    Returns:
        The weights and biases to shard, and why other tables are not; by first FQN in the root.
    """
    parameters = dict(root.named_parameters())
    shardings: dict[str, VocabularySharding] = {}
    reasons: dict[str, str] = {}
    tables = [full_shape(parameters[name]) for name, use in uses.items() if use.is_table]
    largest = max(tables, key=prod, default=(0, 0))
    for name, use in uses.items():
        shape = full_shape(parameters[name])
        if not (use.is_table or use.is_head) or len(shape) != 2:
            continue
        if use.is_table and not use.is_head:
            if use.other:
                reasons[name] = use.other
                continue
            if shape[0] * _SMALL_TABLE_FACTOR <= largest[0] or prod(shape) * _SMALL_TABLE_FACTOR <= prod(largest):
                reasons[name] = f"a table of {shape[0]} rows, small beside one of {largest[0]}"
                continue
        if use.other or len(use.dims) != 1:
            continue
        (dim,) = use.dims
        # An untied head is worth it if only a loss reads its output, and that is larger than its input.
        if not use.is_table and (use.reads_others or not use.reads_loss or shape[dim] <= shape[1 - dim]):
            continue
        if shape[dim] <= shape[1 - dim]:
            reasons[name] = f"a table of {shape[dim]} rows of {shape[1 - dim]}: less than what ranks would send for it"
            continue
        if not _can_shard(shape[dim], size):
            reasons[name] = f"its vocabulary of {shape[dim]} rows is too small for {size} ranks"
            continue
        shardings[name] = VocabularySharding(dim, use.outside, use.is_head)
        for bias in use.biases:
            bias_use = uses[bias]
            is_bias_alone = not (bias_use.other or bias_use.is_table or bias_use.is_head)
            if is_bias_alone and full_shape(parameters[bias]) == (shape[dim],):
                shardings[bias] = VocabularySharding(0, bias_use.outside, is_head=True)
    return shardings, reasons


def _can_shard(length: int, size: int) -> bool:
    return length % size == 0 or (length >= _UNEVEN_ROWS * size and -(-length // size) * (size - 1) < length)
