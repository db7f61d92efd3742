"""Record of the pipeline ranks that have the content of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Ranks = tuple[int, ...] | None  # None: all


def covers(ranks: Ranks, wanted: Ranks) -> bool:
    """Whether content that is on ``ranks`` is on all of the ranks in ``wanted``."""
    return ranks is None or (wanted is not None and set(wanted) <= set(ranks))


class ValueLocations:
    """Records the ranks of the tensors of one run; the record is the same on every rank of the pipeline.

    Records are of tensors, and of storages made in a hook: ``nn.Parameter(x)`` makes one that no operation returns.
    They are beside the tensors, whose attributes would be pickled with them.
    """

    def __init__(self, num_ranks: int) -> None:
        """Take the number of ranks of the pipeline."""
        self._num_ranks = num_ranks
        self._records = WeakIdKeyDictionary()  # of tensors and storages: (ranks, origins)
        self._placed: dict[int, tuple[Tensor, Ranks, frozenset[str]]] = {}

    def set_parameter_ranks(self, parameter: Tensor, ranks: Sequence[int], fqn: str) -> None:
        """Record that ``parameter``, of any shape, is on these ranks for the whole run, whatever its data become."""
        self._placed[id(parameter)] = parameter, self._limited(ranks), frozenset({fqn})

    def record(
        self,
        tensor: Tensor,
        ranks: Sequence[int],
        inputs: Sequence[Tensor],
        *,
        only_tensor: bool = False,
    ) -> None:
        """Record that the content of ``tensor`` is on these ranks.

        Args:
            tensor: A gradient, or the result of an operation; of any shape.
            ranks: Pipeline ranks.
            inputs: Of the operation; a view of one of them shares its storage, the rest of which may be on other ranks.
            only_tensor: Whether other tensors may share the storage.
        """
        # The origins are parameters, not operations: ranks may compute a result in other ways, in lists or one by one.
        origins = frozenset().union(*(self.origins_of(other) for other in inputs))
        record = self._limited(ranks), origins
        self._records[tensor] = record
        storage = _storage(tensor)
        if storage is not None and not only_tensor and not any(_storage(other) is storage for other in inputs):
            self._records[storage] = record

    def is_recorded(self, tensor: Tensor) -> bool:
        """Whether ranks are recorded of ``tensor``, of any shape."""
        return self._record_of(tensor) is not None

    def ranks_of(self, tensor: Tensor) -> Ranks:
        """The ranks with the content of ``tensor``, of any shape; all (None) if nothing is recorded."""
        record = self._record_of(tensor)
        return None if record is None else record[0]

    def origins_of(self, tensor: Tensor) -> frozenset[str]:
        """FQNs of the parameters from which ``tensor``, of any shape, was computed, or whose gradient it is."""
        record = self._record_of(tensor)
        return frozenset() if record is None else record[1]

    def _record_of(self, tensor: Tensor) -> tuple[Ranks, frozenset[str]] | None:
        if id(tensor) in self._placed:
            return self._placed[id(tensor)][1:]
        storage = _storage(tensor)
        found = self._records.get(tensor)
        return self._records.get(storage) if found is None and storage is not None else found

    def _limited(self, ranks: Sequence[int]) -> Ranks:
        return None if len(set(ranks)) == self._num_ranks else tuple(sorted(set(ranks)))


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
