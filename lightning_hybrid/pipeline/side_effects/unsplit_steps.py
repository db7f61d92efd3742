"""Steps whose batches are not split, since microbatches do not tell what the batch leaves (``kept_values``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_hybrid.pipeline.stages.trace_cache import Call, VariantChoice
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.step.batch.microbatch import batch_size_of, sizes_of
from lightning_hybrid.step.objects.lru_cache import Recent
from lightning_hybrid.step.recording.kept_values import why_not_joined
from lightning_hybrid.step.tracing.recording import Recording

# Batches may come in ever new sizes.
_MOST_REASONS = 512


class StepsAtOnce:
    """Decides that for the steps of one module.

    Attributes:
        names: Names of such steps, so far.
    """

    def __init__(self, choice: VariantChoice, tell: Callable[[str, str], None]) -> None:
        """Args: choice: of recorded forms. tell: called once with the name of such a step, and the reason."""
        self.names: set[str] = set()
        self._choice, self._tell = choice, tell
        self._reasons: Recent[tuple[Variant, int | None, bool], str] = Recent(_MOST_REASONS)

    def adopts(
        self, call: Call, variants: Sequence[Variant], batch: Any, microbatches: Sequence[Any], *, is_returned: bool
    ) -> bool:
        """Whether a step turns out to be one.

        Args:
            call: Of the step.
            variants: The recorded form of each microbatch.
            batch: The whole batch.
            microbatches: Its parts.
            is_returned: Whether what the step returns is read.
        """
        for variant, samples in dict.fromkeys(zip(variants, sizes_of(microbatches), strict=True)):
            key = variant, samples, is_returned
            if key not in self._reasons:
                self._reasons[key] = why_not_joined(
                    variant.recording,
                    samples,
                    whole=self._recorded_whole(call, batch) if variant.recording.appended else None,
                    total=batch_size_of(batch),
                    is_returned=is_returned,
                )
            if self._reasons[key]:
                self._tell(call.name, self._reasons[key])
                self.names.add(call.name)
                return True
        return False

    def _recorded_whole(self, call: Call, batch: Any) -> Recording | None:
        try:
            (whole,) = self._choice.choose(call, [batch])
        except Exception:  # the step need not run on a whole batch
            return None
        return whole.recording
