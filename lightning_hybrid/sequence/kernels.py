"""Attention of queries to one block of keys, with the log-sum-exp of its scores; forward and backward.

The softmax over all keys follows from blocks of keys (Milakov and Gimelshein 2018; Liu et al. 2023, section 3):

    out = sum over blocks of exp(lse_block - lse) * out_block,    lse = log(sum over blocks of exp(lse_block))

and with ``out`` and ``lse`` of all keys the gradients of one block need no other block (Dao et al. 2022, appendix B.4).
torch's kernels return the log-sum-exp of a block, and take that of all keys in their backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_FLASH_FEATURES = 256  # the largest head that torch's flash kernel for CUDA takes
_ALIGNED = 8  # its kernels for CUDA take heads of multiples of this


@dataclass(frozen=True)
class Scores:
    """How the scores of a block are made."""

    scale: float  # factor of the products of queries and keys
    is_causal: bool = False  # whether query i attends to keys 0 to i of the block
    # none, a boolean tensor of the pairs that attend, or addends of the scores; broadcast to ``(batch, heads, queries,
    # keys)``
    mask: Tensor | None = None
    mask_needs_grad: bool = False  # whether the backward returns the gradient of the mask


class Kernel(Protocol):
    """Attention to one block; all tensors are ``(batch, heads, positions, features of a head)``, with equal heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp ``(batch, heads, queries)``, -inf where a query has no key."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of queries, keys, values and, where it needs one, the mask, each of the shape of its tensor.

        ``out`` and ``lse`` of shape ``(batch, heads, queries)`` are those of all keys.
        """


def kernel_for(q: Tensor, v: Tensor, mask: Tensor | None) -> Kernel:
    """Chooses the kernel for queries and values ``(batch, heads, positions, features of a head)``, with this mask."""
    if not q.shape[-2] or not v.shape[-2]:
        return NoPairs()
    if q.shape[-1] != v.shape[-1] or (mask is not None and mask.requires_grad):
        return MatrixProducts()
    if q.device.type == "cpu":
        return FlashOnCpu()
    if q.device.type == "cuda" and q.shape[-1] % _ALIGNED == 0:
        if mask is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= _FLASH_FEATURES:
            return FlashOnCuda()
        if q.dtype is not torch.float64:
            return EfficientOnCuda()
    return MatrixProducts()


class MatrixProducts:
    """Matrix products that hold all scores of a block, for any device, mask and size of heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`, of the same shapes; the log-sum-exp is float32, or float64 for float64."""
        values = _scores_of(q, k, scores)
        lse = values.logsumexp(-1)
        out = _softmax(values, lse) @ v.to(values.dtype)
        return out.to(q.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `Kernel.backward`, of the same shapes."""
        weights = _softmax(_scores_of(q, k, scores), lse)
        dtype = weights.dtype
        wide_grad = grad.to(dtype)
        grad_weights = wide_grad @ v.to(dtype).mT
        delta = (wide_grad * out.to(dtype)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta)
        grad_q = (grad_scores @ k.to(dtype)) * scores.scale
        grad_k = (grad_scores.mT @ q.to(dtype)) * scores.scale
        mask = scores.mask
        grad_mask = grad_scores.sum_to_size(mask.shape) if mask is not None and scores.mask_needs_grad else None
        return grad_q.to(q.dtype), grad_k.to(k.dtype), (weights.mT @ wide_grad).to(v.dtype), grad_mask


class NoPairs:
    """Blocks without a query or without a key, at which torch's kernels crash."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`: zeros of shape (batch, heads, queries, features), and -inf."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `Kernel.backward`: zeros of the shapes of queries, keys and values."""
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None


class FlashOnCpu:
    """torch's flash attention for CPUs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`, of the same shapes."""
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = _addends(scores.mask, q, k)
        out, lse = run(q, k, v, 0.0, scores.is_causal, attn_mask=mask, scale=scores.scale)
        return out, _of_attended(lse, mask)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `Kernel.backward`, of the same shapes."""
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        mask = _addends(scores.mask, q, k)
        grads = run(grad, q, k, v, out, _finite(lse), 0.0, scores.is_causal, attn_mask=mask, scale=scores.scale)
        return (*grads, None)


class FlashOnCuda:
    """torch's flash attention for CUDA: half precision."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`, of the same shapes."""
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = run(q, k, v, 0.0, scores.is_causal, scale=scores.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `Kernel.backward`, of the same shapes."""
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
        lengths = q.shape[-2], k.shape[-2]
        tensors = grad, q, k, v, out, lse.contiguous(), None, None, *lengths
        return (*run(*tensors, 0.0, scores.is_causal, unused, unused, scale=scores.scale), None)


class EfficientOnCuda:
    """torch's memory-efficient attention for CUDA: float32 as well, and masks."""

    _MULTIPLE = 32  # of positions in its log-sum-exp
    _ROW_MULTIPLE = 16  # of the elements between two rows of a mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`, of the same shapes."""
        run: Any = torch.ops.aten._scaled_dot_product_efficient_attention
        mask = self._aligned(scores.mask, q, k)
        out, lse, *_ = run(q, k, v, mask, True, 0.0, scores.is_causal, scale=scores.scale)
        return out, _of_attended(lse[..., : q.shape[-2]], mask)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `Kernel.backward`, of the same shapes."""
        run: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout
        lse = F.pad(_finite(lse), (0, -lse.shape[-1] % self._MULTIPLE), value=torch.inf)
        needed = [True, True, True, False]
        tensors = grad, q, k, v, self._aligned(scores.mask, q, k), out, lse, unused, unused
        q_grad, k_grad, v_grad, _ = run(*tensors, 0.0, needed, scores.is_causal, scale=scores.scale)
        return q_grad, k_grad, v_grad, None

    def _aligned(self, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        mask = _addends(mask, q, k)
        if mask is None:
            return None
        mask = mask.to(q.dtype).expand(*q.shape[:2], -1, -1)
        keys = mask.shape[-1]
        return F.pad(mask, (0, -keys % self._ROW_MULTIPLE))[..., :keys]


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges the attention to a further block into that to the blocks before, in place.

    Outputs are ``(batch, heads, queries, features)``, each with its log-sum-exp ``(batch, heads, queries)``.
    """
    largest = torch.maximum(lse, block_lse)
    finite = largest.masked_fill(largest == -torch.inf, 0)  # queries without a key so far
    before, more = (lse - finite).exp(), (block_lse - finite).exp()
    total = before + more
    share = (more / total.clamp_min(torch.finfo(total.dtype).tiny)).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), share)
    lse.copy_(total.log() + finite)


def _scores_of(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """The masked scores, in float32, or float64 for float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    values = (q.to(dtype) * scores.scale) @ k.to(dtype).mT
    if scores.is_causal:
        later = torch.ones(values.shape[-2:], dtype=torch.bool, device=values.device).triu(1)
        values = values.masked_fill(later, -torch.inf)
    if scores.mask is None:
        return values
    if scores.mask.dtype is torch.bool:
        return values.masked_fill(~scores.mask, -torch.inf)
    return values + scores.mask.detach()


def _addends(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as addends in float32 or the dtype of the queries, ``(batch or 1, heads or 1, queries, keys)``."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    mask = mask.detach().to(q.dtype if mask.dtype is not torch.float32 else mask.dtype)
    mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    return mask.expand(*mask.shape[:2], q.shape[-2], k.shape[-2])


def _of_attended(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The log-sum-exp, -inf for queries without a key: torch's kernels say 0."""
    return lse if mask is None else lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, 0 for queries without a key, whose scores are -inf."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _softmax(values: Tensor, lse: Tensor) -> Tensor:
    """Weights of a block from its scores and a log-sum-exp; zeros for queries without a key."""
    return (values - _finite(lse).unsqueeze(-1)).exp()
