"""Parameters of layers that code outside of them reads, which are no layer's own to gather and free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_hybrid.step.objects.modules import find_layers

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant


class LayerReads:
    """Records parameters of a layer that code outside of it reads: ``self.positions.weight[:n]``.

    Attributes:
        names: Their FQNs, once the step was recorded inside.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """Observe the layers while the step is recorded inside."""
        from lightning_hybrid.tensor.discovery.unit_calls_and_outside_reads import record_calls

        units = variant.recording.units
        with record_calls(find_layers(units), units) as calls:
            yield
        self.names = frozenset(f"{layer}.{name}" for layer, names in calls.read_outside.items() for name in names)
