"""The function mode under which a unit attends by ring attention, from local positions throughout.

Its code runs on the positions of a context rank as it would on a shorter sequence. Three operations see the difference:

- `scaled_dot_product_attention` of local queries and keys becomes ring attention. Where the keys are those of another
  sequence, which all ranks have, the local queries attend to them, and their gradient is summed over the context ranks;
- beside a value with local positions, an operand with those of the full sequence (rotary embeddings) is cut to the
  local ones: torch could not combine the two;
- a mask is cut to the rows of the local queries.

While learning it decides by the sizes what the keys are, and records a rule for each call. Afterwards it follows the
rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lightning_hybrid.errors import CannotShard
from lightning_hybrid.sequence.forward import FullSequence
from lightning_hybrid.sequence.positions import SequenceSharding, local_positions
from lightning_hybrid.sequence.ring import local_rows, ring_attention
from lightning_hybrid.tensor.collectives import enter
from lightning_hybrid.tensor.plan import RING, Rule, Site
from lightning_hybrid.tensor.region import BROADCAST, mark, sharded_over, site_of_call

_OWN_KEYS, _OTHER_KEYS = ("local keys",), ("keys of another sequence",)


class RingAttentionMode(TorchFunctionMode):
    """The function mode that is active while a context rank runs a unit with ring attention.

    Attributes:
        rules: What the keys of each call are; filled while learning.
    """

    def __init__(self, sharding: SequenceSharding, rules: dict[Site, Rule], *, learning: bool) -> None:
        """Makes the mode of one forward."""
        super().__init__()
        self._sharding, self.rules, self._learning = sharding, rules, learning
        self._lengths = sharding.local_length, sharding.length

    @classmethod
    def of(cls, sequence: FullSequence, rules: dict[Site, Rule], *, learning: bool) -> RingAttentionMode | None:
        """The mode of a forward of the unit; None if it attends otherwise."""
        if sequence.outer is None or not sequence.attends_by_ring:
            return None
        return cls(sequence.outer, rules, learning=learning)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            return self._scaled_dot_product_attention(site_of_call(RING), *args, **kwargs)
        if getattr(func, "__name__", "") in BROADCAST:
            args, kwargs = self._at_local_positions(args, kwargs)
        return func(*args, **kwargs)

    def _scaled_dot_product_attention(
        self,
        site: Site,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p > 0:
            refuse_dropout(dropout_p)
        if not enable_gqa and key.shape[:-2] != query.shape[:-2]:
            raise CannotShard(
                f"ring attention takes equal heads of queries and keys without enable_gqa, not {tuple(query.shape)} and"
                f" {tuple(key.shape)}",
                entry="ring-attention",
            )
        if not self.keys_are_local(site, query, key):
            options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return self._attend_to_other_keys(query, key, value, attn_mask, options)

        def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
            if has_torch_function((query, key, value)):  # outer modes see an operation of this name
                return handle_torch_function(
                    scaled_dot_product_attention, (query, key, value), query, key, value, attn_mask
                )
            return self.attend(query, key, value, () if attn_mask is None else (attn_mask,), is_causal, scale)

        mask = None if attn_mask is None else local_rows(attn_mask, self._sharding)
        return scaled_dot_product_attention(query, key, value, mask)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: tuple[Tensor, ...] = (),
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attends from and to local positions, as `ring_attention`, with its arguments and shapes."""
        with torch._C.DisableTorchFunction():
            return ring_attention(query, key, value, self._sharding, masks=masks, is_causal=is_causal, scale=scale)

    def attend_in_module(
        self,
        fqn: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: list[Tensor],
        *,
        is_causal: bool,
        dropout_p: float,
        need_weights: bool,
    ) -> Tensor:
        """The attention of an `nn.MultiheadAttention`, from local positions; ``(batch, heads, positions, features)``.

        Raises:
            CannotShard: It cannot do that.
        """
        if dropout_p > 0:
            refuse_dropout(dropout_p)
        if need_weights:
            raise CannotShard(
                f"ring attention has no attention weights of all positions, and {fqn or 'the unit'} is called with"
                " need_weights=True; pass need_weights=False",
                entry="ring-attention",
            )
        if not self.keys_are_local((RING, fqn), query, key):  # one weight may project queries and keys
            raise CannotShard(
                f"ring attention has no nn.MultiheadAttention from one sequence to another, as {fqn or 'the unit'} is",
                entry="ring-attention",
            )
        return self.attend(query, key, value, tuple(masks), is_causal)

    def keys_are_local(self, site: Site, query: Tensor, key: Tensor) -> bool:
        """Whether keys ``(..., positions, features)`` are at the local positions, and not of another sequence.

        Raises:
            CannotShard: The queries are not local, or the call is not that of the proof.
        """
        local, _ = self._lengths
        queries, keys = query.shape[-2], key.shape[-2]
        if self._learning:
            found = _OWN_KEYS if queries == keys == local else _OTHER_KEYS
            if self.rules.setdefault(site, found) != found:
                raise CannotShard(
                    "ring attention in a call that attends to its own keys and to others", entry="ring-attention"
                )
        rule = self.rules.get(site)
        if queries != local or rule is None or (rule == _OWN_KEYS and keys != local):
            raise CannotShard(
                f"ring attention from {queries} to {keys} positions where a context rank has {local}, in another call"
                " than in the proof of the unit's plan",
                entry="ring-attention",
            )
        return rule == _OWN_KEYS

    def _attend_to_other_keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Local queries attend to a full sequence; each rank has the gradient of its queries alone."""
        if options["is_causal"]:
            raise CannotShard(
                "ring attention has no is_causal for the keys of another sequence", entry="ring-attention"
            )
        sharding, ranks = self._sharding, self._sharding.ranks
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == sharding.length:
            mask = local_positions(mask, SequenceSharding(mask.dim() - 2, sharding.length, ranks))
        elif mask is not None and mask.requires_grad:
            mask = enter(mask, ranks)
        key, value = (self._with_mark_of(tensor, enter(tensor, ranks)) for tensor in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    def _with_mark_of(self, value: Tensor, changed: Tensor) -> Tensor:
        """Marks a changed value as sharded over tensor ranks if the value was."""
        size = sharded_over(value)
        return mark(changed, size) if size else changed

    def _at_local_positions(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cuts operands with all positions, beside one with the local positions in the same dim, to the local ones."""
        local, length = self._lengths
        shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        dims = {-k for shape in shapes for k in range(1, len(shape) + 1) if shape[-k] == local} if local > 1 else set()
        if len(shapes) < 2 or not dims:
            return args, kwargs

        def operand(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for dim in dims:
                if value.dim() >= -dim and value.shape[dim] == length:
                    cut = SequenceSharding(value.dim() + dim, length, self._sharding.ranks)
                    value = self._with_mark_of(value, local_positions(value, cut))
            return value

        return tuple(operand(value) for value in args), {name: operand(value) for name, value in kwargs.items()}


def refuse_dropout(probability: float) -> None:
    """Refuses dropout of attention weights.

    Raises:
        CannotShard: With the remedy.
    """
    raise CannotShard(
        f"ring attention has no dropout of attention weights and dropout_p is {probability:g}; set the dropout of the"
        " attention to 0, or a context_parallel_size that divides the number of heads",
        entry="ring-attention",
    )
