"""Head-parallel `nn.MultiheadAttention`, whose forward is one functional call that checks its sizes.

Each rank projects to its local heads, attends, and adds its addend of the output; the arithmetic is that of
`torch.nn.functional.multi_head_attention_forward` with `num_heads / size` heads, by the same kernels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.params.placement import Piece, Placement, Shard
from lightning_hybrid.tensor.collectives import Ranks, gather, leave


def attention_placements(fqn: str, module: nn.MultiheadAttention, size: int) -> dict[str, Placement]:
    """Placements of an attention module's parameters, by FQN inside the unit; the output's bias is replicated."""
    width = module.embed_dim
    three = tuple(Piece(width, size) for _ in range(3))
    pieces: dict[str, Placement] = {
        "in_proj_weight": Shard(0, three),
        "in_proj_bias": Shard(0, three),
        "q_proj_weight": Shard.evenly(0, width, size),
        "k_proj_weight": Shard.evenly(0, width, size),
        "v_proj_weight": Shard.evenly(0, width, size),
        "bias_k": Shard.evenly(2, width, size),
        "bias_v": Shard.evenly(2, width, size),
        "out_proj.weight": Shard.evenly(1, width, size),
    }
    names = {name for name, _ in module.named_parameters()}
    return {f"{fqn}.{name}" if fqn else name: placement for name, placement in pieces.items() if name in names}


def sharded_attention(
    module: nn.MultiheadAttention,
    ranks: Ranks,
    enter: Callable[[Tensor], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor],
    around_draw: Callable[[], AbstractContextManager[Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    ring: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The forward of ``module``, which holds its local shards; returns ``(..., features)`` and attention weights."""
    assert attn_mask is not None or not is_causal, "is_causal is a hint and needs attn_mask"
    # Before anything else, so that one tensor passed three times enters once.
    query, key, value = enter(query), enter(key), enter(value)
    attn_mask = None if attn_mask is None else enter(attn_mask)
    key_padding_mask = None if key_padding_mask is None else enter(key_padding_mask)
    is_batched = query.dim() == 3
    num_heads = module.num_heads // ranks.size
    if not is_batched and key_padding_mask is not None:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    q, k, v = _local_heads(module, (query, key, value), num_heads)
    batch, _, length, features = q.shape
    masks = _masks(q, attn_mask, key_padding_mask, ranks)
    is_causal &= key_padding_mask is None and not need_weights  # as torch's own forward
    mixed, attention = _attended(module, (q, k, v), masks, around_draw, ring, is_causal, need_weights)
    mixed = mixed.permute(2, 0, 1, 3).reshape(length, batch, num_heads * features)
    out = F.linear(mixed, module.out_proj.weight)
    if not is_batched:
        out = out.squeeze(1)
    elif module.batch_first:
        out = out.transpose(0, 1)
    out = sum_over_ranks(out)
    if module.out_proj.bias is not None:
        out = out + module.out_proj.bias.to(out.dtype)
    shown = None if attention is None else _returned_weights(attention, ranks, average_attn_weights)
    return out, shown if shown is None or is_batched else shown.squeeze(0)


def _local_heads(
    module: nn.MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects to this rank's queries, keys and values: ``(batch, heads, positions, features of a head)`` each."""
    weights, biases = _projections(module)
    # Before any transposition, which would be copied and saved for each of them.
    q, k, v = (F.linear(tensor, weight, bias) for tensor, weight, bias in zip(inputs, weights, biases, strict=True))
    if q.dim() == 2:  # no batch
        q, k, v = (tensor.unsqueeze(1) for tensor in (q, k, v))
    elif module.batch_first:
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    batch = q.shape[1]
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.repeat(1, batch, 1)])
        v = torch.cat([v, module.bias_v.repeat(1, batch, 1)])
    # (batch, heads, positions, features of a head)
    q, k, v = (t.reshape(t.shape[0], batch, num_heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    if module.add_zero_attn:
        zeros = k.new_zeros(batch, num_heads, 1, k.shape[-1])
        k, v = torch.cat([k, zeros], 2), torch.cat([v, zeros], 2)
    return q, k, v


def _attended(
    module: nn.MultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    masks: list[Tensor],
    around_draw: Callable[[], AbstractContextManager[Any]],
    ring: Callable[..., Tensor] | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The attention of this rank's heads, and its weights ``(batch, heads, queries, keys)`` if they are needed."""
    q, k, v = inputs
    masks, dropout = [] if is_causal else masks, module.dropout * module.training
    if ring is not None:
        return ring(q, k, v, masks, is_causal=is_causal, dropout_p=dropout, need_weights=need_weights), None
    masks = [F.pad(mask, (0, k.shape[2] - mask.shape[-1])) for mask in masks]  # zeros for keys that were appended
    with around_draw() if dropout else contextlib.nullcontext():
        if not need_weights:
            mask = sum(masks[1:], masks[0]) if masks else None
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
        scores = sum(masks, (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1))
        weights = torch.softmax(scores, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights


def _masks(q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, ranks: Ranks) -> list[Tensor]:
    """The masks as addends that broadcast to ``(batch, local heads, queries, keys)``."""
    batch, num_heads = q.shape[:2]
    masks = []
    if attn_mask is not None:
        mask = _addend(attn_mask, q)
        if mask.dim() == 3:  # (batch * heads, queries, keys)
            mask = mask.unflatten(0, (batch, num_heads * ranks.size))
            mask = mask.narrow(1, ranks.rank * num_heads, num_heads)
        masks.append(mask)
    if key_padding_mask is not None:
        masks.append(_addend(key_padding_mask, q)[:, None, None, :])
    return masks


def _projections(module: nn.MultiheadAttention) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    if module._qkv_same_embed_dim:
        assert module.in_proj_weight is not None
        weights = module.in_proj_weight.chunk(3)
    else:
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = tuple(weight for weight in separate if weight is not None)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return weights, biases


def _addend(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))
    return mask.to(scores.dtype)


def _returned_weights(attention: Tensor, ranks: Ranks, averaged: bool) -> Tensor:
    """The attention weights that are returned: of all heads, or their mean."""
    if averaged:
        return leave(attention.sum(1) / (attention.shape[1] * ranks.size), ranks)
    return gather(attention, 1, ranks)
