"""A bounded cache that forgets what was used longest ago."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict that forgets what was read or written least lately, once it has more than ``most`` members."""

    def __init__(self, most: int) -> None:
        """Args: most: how many it keeps."""
        super().__init__()
        self._most = most

    def __getitem__(self, key: K) -> V:
        """The value, which is the latest now."""
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        """Keep a value; the eldest goes."""
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
