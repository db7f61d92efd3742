"""A function mode for code outside of units that uses vocabulary-parallel weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.parts.parameter_shard_placement import Shard
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call
from lightning_hybrid.tensor.collectives.collectives_over_rank_groups import Ranks
from lightning_hybrid.tensor.vocabulary.vocabulary_ranges_and_local_shard import Vocabulary
from lightning_hybrid.tensor.vocabulary.vocabulary_tensor import represent

# Attributes of a parameter that are equal for its shard, or belong to the shard.
_OF_SHARD = frozenset({"grad", "requires_grad", "is_leaf", "grad_fn", "_backward_hooks", "device", "dtype", "layout"})
_IDENTITY = frozenset({"__hash__", "requires_grad_", "register_hook", "__set__", "__delete__"})


class WeightsOutsideUnits(TorchFunctionMode):
    """A mode in which operations on a vocabulary-parallel weight get it as a tensor of the full shape."""

    def __init__(self, placements: Mapping[int, Shard], ranks: Ranks) -> None:
        """Takes the placements by id of the parameter, which holds this rank's shard, and the ranks of all shards."""
        super().__init__()
        self._sharded = {
            key: (placement.dim, Vocabulary(placement.length, ranks)) for key, placement in placements.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _IDENTITY or (name == "__get__" and func.__self__.__name__ in _OF_SHARD):
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        if any(id(leaf) in self._sharded for leaf in leaves):
            leaves = [represent(x, *self._sharded[id(x)]) if id(x) in self._sharded else x for x in leaves]
            args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        return func(*args, **kwargs)
