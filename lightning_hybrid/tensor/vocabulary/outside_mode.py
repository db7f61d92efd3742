"""A function mode for code outside of units that uses a vocabulary-parallel weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call
from lightning_hybrid.tensor.collectives.rank_collectives import Ranks
from lightning_hybrid.tensor.vocabulary.vocabulary_shard import Vocabulary
from lightning_hybrid.tensor.vocabulary.vocabulary_tensor import represent

# What a parameter is asked that is the same of its part, or is its part's own.
_OWN = frozenset({"grad", "requires_grad", "is_leaf", "grad_fn", "_backward_hooks", "device", "dtype", "layout"})
_IDENTITY = frozenset({"__hash__", "requires_grad_", "register_hook", "__set__", "__delete__"})


class OutsideVocabularyMode(TorchFunctionMode):
    """Operations on such a weight see it as the whole while this is entered."""

    def __init__(self, placements: Mapping[int, Shard], ranks: Ranks) -> None:
        """Args: placements: by id of the parameter, which holds this rank's part. ranks: that hold the others."""
        super().__init__()
        self._cut = {key: (placement.dim, Vocabulary(placement.length, ranks)) for key, placement in placements.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it on what says that it is the whole."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _IDENTITY or (name == "__get__" and func.__self__.__name__ in _OWN):
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        if any(id(leaf) in self._cut for leaf in leaves):
            leaves = [represent(leaf, *self._cut[id(leaf)]) if id(leaf) in self._cut else leaf for leaf in leaves]
            args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        return func(*args, **kwargs)
