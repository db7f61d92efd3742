"""A storage that autograd has saved: encoded and moved away, and restored when the backward needs it.

With hooks on saved tensors torch does not check whether one was written to meanwhile; `Unchanged` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_AHEAD = 4  # storages that are fetched before the backward needs them


class OnDevice:
    """A tensor of shape (n,) that stays where it is; in derived classes, one that is somewhere else."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def prefetch(self) -> None:
        """Starts to fetch it."""

    def get(self) -> Tensor:
        """Returns it on its device, of shape (n,)."""
        return self._tensor

    def release(self) -> None:
        """Gives its space back; torch reuses memory once nothing refers to it."""


class StoredStorage:
    """A storage of a saved tensor; all views of it that autograd saves share it."""

    def __init__(
        self,
        original: Tensor,
        parts: tuple[OnDevice, ...],
        decode: Callable[..., Tensor],
        previous: Callable[[], StoredStorage | None],
    ) -> None:
        """Takes the tensor that has the storage, its encoded parts, and the function that makes (n,) from them.

        ``previous`` returns the one saved before, which a backward needs after this one, while it is there.
        """
        # As long as this reference exists, torch uses the address of the storage for no other.
        self._storage = StorageWeakRef(original.untyped_storage())
        self._parts, self._decode, self._previous = parts, decode, previous
        self._flat: Tensor | None = None
        self._exact: Tensor | None = None
        self._uses_exact = False
        self.is_moved = any(type(part) is not OnDevice for part in parts)

    def keep_exact(self, exact: Tensor | None) -> None:
        """Keeps the tensor without encoding, of shape (n,), while a gradient's error is measured; None drops it."""
        self._exact = exact

    def return_exact(self, uses_exact: bool) -> None:
        """Lets ``flat`` return the tensor without encoding."""
        self._uses_exact = uses_exact

    def flat(self) -> Tensor:
        """Returns the content, of shape (n,), and starts to fetch those saved before."""
        if self._uses_exact and self._exact is not None:
            return self._exact
        if self._flat is None:
            with torch.no_grad():
                self._flat = self._decode(*(part.get() for part in self._parts))
            self._release()
        other, left = self._previous(), _AHEAD
        while left and other is not None:
            if other.is_moved:
                other.prefetch()
                left -= 1
            other = other._previous()
        return self._flat

    def prefetch(self) -> None:
        """Starts to fetch what is elsewhere."""
        for part in self._parts:
            part.prefetch()

    def _release(self) -> None:
        parts, self._parts = self._parts, ()
        for part in parts:
            part.release()

    def __del__(self) -> None:
        """Gives the space back once autograd has dropped all views."""
        self._release()


def no_storage() -> StoredStorage | None:
    """Returns none: what is before the first one."""
    return None


class KeptStorage:
    """A storage that stays as it is, and whose views autograd saves."""

    def __init__(self, original: Tensor) -> None:
        self._storage = StorageWeakRef(original.untyped_storage())


class SavedView:
    """What autograd holds in place of a tensor: a view of a stored storage."""

    __slots__ = ("_offset", "_size", "_stride", "storage")

    def __init__(self, storage: StoredStorage, tensor: Tensor) -> None:
        self.storage, self._size, self._stride = storage, tensor.size(), tensor.stride()
        self._offset = int(tensor.storage_offset())

    def restore(self) -> Tensor:
        """Returns the tensor, of the shape it was saved with."""
        return self.storage.flat().as_strided(self._size, self._stride, self._offset)


class SavedTensor:
    """What autograd holds where the tensor itself, of any shape, stays; ``kept`` stays alive with it."""

    __slots__ = ("_checks", "_kept", "_tensor", "_version")

    def __init__(self, tensor: Tensor, kept: KeptStorage | None, *, may_be_written: bool) -> None:
        """Keeps a tensor; its owner may write to it before the backward, such as ZeRO to a parameter."""
        # A parameter has no graph; other tensors may be results of the node that holds this.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._kept, self._version, self._checks = kept, tensor._version, not may_be_written

    def restore(self) -> Tensor:
        """Returns the tensor, of the shape it was saved with; a RuntimeError if it was written to."""
        if self._checks:
            _check_version(self._tensor._version, self._version)
        return self._tensor


class Unchanged:
    """The version of a tensor when it was saved, until a copy of it is made."""

    __slots__ = ("_tensor", "_version", "_written")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()  # it shares the version
        self._version = self._written = tensor._version

    def seal(self) -> None:
        """Notes whether it has been written to so far, since the copy is complete, and drops it."""
        if self._tensor is not None:
            self._written, self._tensor = self._tensor._version, None

    def check(self) -> None:
        """Checks that the content has not changed since it was saved.

        Raises:
            RuntimeError: It was written to.
        """
        tensor = self._tensor
        _check_version(self._written if tensor is None else tensor._version, self._version)


def _check_version(now: int, expected: int) -> None:
    """Raises an error worded as torch's if a saved tensor was written to."""
    if now != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" that a layer saved is at version {now}; expected version {expected} instead"
        )
