"""Callbacks that the strategy adds to a trainer for the time of a run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class RunCallback(pl.Callback):
    """A callback that belongs to one run; where a trainer's callbacks are copied or pickled, one that does nothing."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain callback."""
        del protocol
        return pl.Callback, ()
