"""Several reducers as one: parameters of which different ranks hold copies are averaged over different groups."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.replicate.gradient_reducer import GradientObserver, GradientReducer


class JointReducer:
    """Reducers that are armed and finished together; as `GradientReducer`."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        """Args: reducers: of disjoint parameters; in the same order on every rank."""
        self._reducers = list(reducers)

    @property
    def observer(self) -> GradientObserver | None:
        """Who sees the gradients before and after they are averaged."""
        return self._reducers[0].observer

    @observer.setter
    def observer(self, observer: GradientObserver | None) -> None:
        for reducer in self._reducers:
            reducer.observer = observer

    def arm(self) -> None:
        """Say that the gradients which the next backward accumulates are final."""
        for reducer in self._reducers:
            reducer.arm()

    def finish(self) -> None:
        """Wait for everything."""
        for reducer in self._reducers:
            reducer.finish()

    def reduce(self) -> None:
        """Average the gradients that are there, without a backward."""
        self.arm()
        self.finish()

    def close(self) -> None:
        """Remove the hooks."""
        for reducer in self._reducers:
            reducer.close()
