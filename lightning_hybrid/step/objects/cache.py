"""A bounded dict with least-recently-used eviction."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedLRUDict(dict[K, V]):
    """A dict that evicts the least recently read or written entry when it exceeds ``most`` entries."""

    def __init__(self, most: int) -> None:
        """Take ``most`` (the largest number of entries)."""
        super().__init__()
        self._capacity = most

    def __getitem__(self, key: K) -> V:
        """Return the value and mark it as most recently used."""
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        """Store a value; evict the least recently used one if there are too many."""
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._capacity:
            del self[next(iter(self))]
