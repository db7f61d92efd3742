"""Gradient reducer over several process groups: parameters with replicas on different ranks are averaged together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_hybrid.replicate.gradient_reducer import GradientObserver, GradientReducer


class JointReducer:
    """Arms and finishes several `GradientReducer`s together, with the interface of one."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        """Take ``reducers`` (reducers of disjoint parameters, in the same order on every rank)."""
        self._reducers = list(reducers)

    @property
    def names(self) -> list[str]:
        """FQNs of the parameters whose gradients are averaged, in the order that all ranks must share."""
        return [name for reducer in self._reducers for name in reducer.names]

    @property
    def observer(self) -> GradientObserver | None:
        """The observer of gradients before and after they are averaged."""
        return self._reducers[0].observer

    @observer.setter
    def observer(self, observer: GradientObserver | None) -> None:
        for reducer in self._reducers:
            reducer.observer = observer

    @property
    def is_local(self) -> bool:
        """Whether gradients stay those of this rank."""
        return self._reducers[0].is_local

    @is_local.setter
    def is_local(self, is_local: bool) -> None:
        for reducer in self._reducers:
            reducer.is_local = is_local

    @property
    def unaveraged(self) -> dict[int, str]:
        """FQNs of parameters that got a gradient since the latest average, by their ids."""
        return {key: name for reducer in self._reducers for key, name in reducer.unaveraged.items()}

    @property
    def messages(self) -> list[Tensor]:
        """The flat tensors that are sent, one for each bucket."""
        return [message for reducer in self._reducers for message in reducer.messages]

    def arm(self) -> None:
        """Announces that the gradients accumulated by the next backward are final."""
        for reducer in self._reducers:
            reducer.arm()

    def finish(self) -> None:
        """Waits for all reducers; the averages are then in `grad`."""
        for reducer in self._reducers:
            reducer.finish()

    def reduce(self) -> None:
        """Averages the present gradients, without a backward."""
        self.arm()
        self.finish()

    def abandon(self) -> None:
        """Ends a backward that has failed on some rank."""
        for reducer in self._reducers:
            reducer.abandon()

    def close(self) -> None:
        """Removes the hooks."""
        for reducer in self._reducers:
            reducer.close()
