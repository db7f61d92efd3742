"""Lightning's searches of the batch size refuse strategies that are distributed; this one runs them on all ranks."""

from __future__ import annotations

import sys

from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import tuning

_CHECKS = (BatchSizeFinder.setup.__code__, tuning._check_scale_batch_size_configuration.__code__)
_MAX_FRAMES = 4  # from the check to here


def is_check_of_batch_size_search() -> bool:
    """Whether a search of the batch size checks now that the strategy is not distributed."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code in _CHECKS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
