"""A cross entropy over the vocabulary in chunks of positions, without logits of the full batch."""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl

from lightning_hybrid.logits.heads import ChunkedLoss, find_output_heads, sharded_heads
from lightning_hybrid.techniques.technique import Active, Technique


class ChunkedLosses(Technique):
    """Output heads return lazy logits; a loss computes one chunk of positions after the other.

    Attributes:
        losses: Those of the output heads of this rank, if it has any.
    """

    def __init__(self) -> None:
        self.losses: ChunkedLoss | None = None

    def build(self, run: Any, owner: Any) -> Active:
        """Find the output heads of this rank."""
        setting, option = run.setting, run.setting.options.chunked_loss
        sharded = run.names_over("tp")
        vocabularies = {} if run.shards is None else run.shards.vocabularies()
        is_compiled, is_counted = setting.options.compile is not None, option is not True
        others = sharded - vocabularies.keys()
        heads = find_output_heads(setting.module, sharded=others, is_compiled=is_compiled, any_size=is_counted)
        if not heads and (sharded or run.is_pipelined):
            return Active()  # another stage has them
        is_first = all(run.mesh.rank_in(axis) == 0 for axis in ("data", "cp", "tp"))  # of its stage
        self.losses = ChunkedLoss(
            heads,
            option if is_counted else None,
            around=run.active.gathered,
            inform=logging.getLogger(pl.__name__).info if is_first else lambda _: None,
            warn=warnings.warn if is_first else lambda _: None,
            vocabularies=sharded_heads(setting.module, heads, vocabularies),
        )
        return _Heads(self.losses)

    def lines(self, run: Any) -> list[str]:
        """Return whose logits are not computed in full."""
        if self.losses is None or not run.setting.is_fitting:
            return []
        return [f"loss: in chunks of positions, where it reads the logits of {' or '.join(self.losses.heads)}"]


class _Heads(Active):
    """The output heads of this rank, while a step runs."""

    def __init__(self, losses: ChunkedLoss) -> None:
        self._losses = losses

    def running(self) -> AbstractContextManager[None]:
        """Let heads return lazy logits inside."""
        return self._losses.running()

    def around_step(self) -> AbstractContextManager[None]:
        """Compute logits that the step returns or stores before weights change."""
        return self._losses.step()
