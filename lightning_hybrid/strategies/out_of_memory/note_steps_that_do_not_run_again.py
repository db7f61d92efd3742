"""The note on an error for want of memory that ``microbatch="auto"`` does not answer by more microbatches."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.errors import RankOutOfMemory, is_out_of_memory
from lightning_hybrid.pipeline.runtime.error_notes import add_error_note

_PAGE = "docs/howto/out_of_memory.md"


def note_why_not_run_again(error: BaseException, trainer: Any) -> None:
    """Note on an error that ends a fit with ``microbatch="auto"`` why no training step has run again."""
    if isinstance(error, RankOutOfMemory) or not is_out_of_memory(error):
        return
    if trainer.evaluating:
        add_error_note(
            error,
            'microbatch="auto" fits training steps into memory, and memory has run out in evaluation: set a smaller'
            f" batch_size in its loader ({_PAGE})",
        )
        return
    add_error_note(
        error,
        'microbatch="auto" fits forwards and backwards of training steps into memory, and memory has run out in the'
        " optimizer's step, in a hook, or in a step of a size that has fit before: use less memory"
        f' ({_PAGE}): zero_stage=1 or more, offload="cpu", or a larger num_microbatches',
    )
