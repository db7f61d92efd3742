"""Heads of attention, read from the shapes of the kernels that a recorded step runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_FUSED = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
}
_PRODUCTS, _SOFTMAX = {_ATEN.bmm, _ATEN.baddbmm}, {_ATEN._softmax, _ATEN._safe_softmax}


class AttentionHeads(TorchDispatchMode):
    """Observes kernels of attention: fused ones, and a softmax between two batched products.

    Scores are ``[batch, heads, queries, keys]``, or ``[batch * heads, queries, keys]`` as in ``nn.MultiheadAttention``.
    Where several heads of queries read the same keys, those are expanded, or the kernel gets fewer of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scores: set[tuple[int, int]] = set()  # batch and queries of products
        self._softmax: dict[tuple[int, int], tuple[set[int], int]] = {}  # of such scores, that no product has read
        self._heads: set[int] = set()
        self._batched_heads: set[int] = set()  # times the number of samples
        self._keys: set[tuple[int, int]] = set()  # heads of queries and of keys
        self._expanded: set[tuple[int, int]] = set()  # heads of keys, and how often each is read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe one kernel."""
        out = func(*args, **(kwargs or {}))
        kernel = func._overloadpacket
        if kernel in _FUSED:
            queries, keys = args[0].shape[1], args[1].shape[1]
            self._heads.add(queries)
            self._keys.add((queries, keys))
        elif kernel in _PRODUCTS:
            size = out.shape[0], out.shape[1]
            self._scores.add(size)
            if size in self._softmax:
                found, heads = self._softmax.pop(size)
                found.add(heads)
        elif kernel in _SOFTMAX:
            self._observe_softmax(args[0], args[1])
        elif kernel is _ATEN.expand and out.dim() == 5 and args[0].dim() == 5 and args[0].shape[2] == 1:
            self._expanded.add((out.shape[1], out.shape[2]))
        return out

    def _observe_softmax(self, scores: Tensor, dim: int) -> None:
        if dim not in (-1, scores.dim() - 1) or scores.dim() not in (3, 4):
            return
        size = scores.shape[:-2].numel(), scores.shape[-2]
        if size in self._scores:
            self._softmax[size] = self._heads if scores.dim() == 4 else self._batched_heads, scores.shape[-3]

    def common_numbers(self, samples: int) -> tuple[int | None, int | None]:
        """Return the largest numbers that divide all numbers of heads, and all of keys; None without attention."""
        several = {number for number in self._batched_heads if number > samples and number % samples == 0}
        heads = self._heads | {number // samples for number in several}
        keys = {own for queries, own in self._keys if own < queries}
        keys |= {own for own, times in self._expanded if times > 1 and own * times in heads}
        return _common(heads), _common(heads | keys)


def _common(numbers: Iterable[int]) -> int | None:
    return math.gcd(*numbers) or None
