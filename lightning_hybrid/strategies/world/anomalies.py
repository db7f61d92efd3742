"""Errors of torch's anomaly detection: the user's line, the batch, and what to do, in one error.

torch prints the line in a warning before the error, among frames of every library.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils import _pytree

from lightning_hybrid.errors import add_error_note
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around
from lightning_hybrid.strategies.world.callbacks import RunCallback
from lightning_hybrid.strategies.world.traces import is_of_library
from lightning_hybrid.text import wrapped

_WARNING = "Error detected in "
_ERROR = "returned nan values"
_FRAME = re.compile(r'  File "([^"]+)", line \d+, in .*\n(?:    .*\n)?')
_ADVICE = (
    "keep 0 out of log, sqrt and divisors, clamp what exp takes, lower the learning rate, or set"
    " Trainer(gradient_clip_val=...)"
)


class Anomalies(RunCallback):
    """Completes an error on this rank by what torch has warned of before it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._frames: list[str] = []

    def keep_frames(self) -> Callable[[], None]:
        """Keep torch's warnings for the error that follows each; return the undo."""

        def show(original: Callable[..., None], message: Any, *args: Any, **kwargs: Any) -> None:
            if str(message).startswith(_WARNING):
                found = list(_FRAME.finditer(str(message)))
                inside = itertools.dropwhile(lambda frame: not is_of_library(frame[1]), found)  # below the call of fit
                self._frames = [frame[0].rstrip() for frame in inside if not is_of_library(frame[1])]
            else:
                original(message, *args, **kwargs)

        return around(warnings, "showwarning", show, reason="frames of the user's code alone")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Lightning's hook."""
        if _ERROR not in str(exception):
            return
        rank, number = self._mesh.rank, trainer.fit_loop.epoch_loop.batch_idx
        place = f"in batch {number} of replica {self._mesh.layout.data_rank(rank)}, on rank {rank}"
        if self._frames:
            place = "\n".join([f"{place}, in the gradient of", *self._frames])
        add_error_note(exception, place)
        add_error_note(exception, wrapped(_advice(_batch_of(exception.__traceback__))))


def _batch_of(frames: TracebackType | None) -> Any:
    """The batch that Lightning's loop was in when an error came through it."""
    while frames is not None:
        module, values = str(frames.tb_frame.f_globals.get("__name__")), frames.tb_frame.f_locals
        if module.endswith(".loops.training_epoch_loop") and "batch" in values:
            return values["batch"]
        frames = frames.tb_next
    return ()


def _advice(batch: Any) -> str:
    for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and (count := int((~torch.isfinite(leaf)).sum())):
            return (
                f"NaN or infinite values in batch{_pytree.keystr(path)}: {count:,} of {leaf.numel():,}; drop or mask"
                " such samples in the dataset"
            )
    return f"the batch is finite, so the step makes the NaN: {_ADVICE}"
