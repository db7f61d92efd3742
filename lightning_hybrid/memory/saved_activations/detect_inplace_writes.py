"""Detection of writes to a tensor that autograd has saved: with hooks on saved tensors, torch does not check."""

from __future__ import annotations

from torch import Tensor


class Unchanged:
    """The version of a tensor when it was saved, until a copy of it is made."""

    __slots__ = ("_tensor", "_version", "_written")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()  # it shares the version
        self._version, self._written = tensor._version, -1

    def seal(self) -> None:
        """Notes whether it has been written to so far, since the copy is complete, and drops it."""
        if self._tensor is not None:
            if self._tensor._version != self._version:
                self._written = self._tensor._version
            self._tensor = None

    def check(self) -> None:
        """Checks that the content is that of the time of the save.

        Raises:
            RuntimeError: It was written to.
        """
        if (now := self._written if self._tensor is None else self._tensor._version) != -1:
            check_version(now, self._version)


def check_version(now: int, expected: int) -> None:
    """Checks the version of a saved tensor; a RuntimeError, worded as torch's, if it was written to."""
    if now != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" that a layer saved is at version {now}; expected version {expected} instead"
        )
