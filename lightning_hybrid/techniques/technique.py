"""What a technique does to a run: decided once for a layout, and active in its steps.

A strategy, a dry run and the start table know only these two classes; each method does nothing by default.

    decided   ``Technique``  place: which shards this rank holds  -> build -> lines, messages, memory
    active    ``Active``     around steps, layers and backwards, and where other code reads parameters
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.params.shards import AxisSharding

Operation = Literal["send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class Messages:
    """Messages of one kind that a rank sends in one training step.

    Attributes:
        axis: Name of the axis of the layout, as in ``train/sent_bytes/AXIS``.
        content: What is sent.
        operation: The collective, or "send".
        num_ranks: Ranks of the group; 2 for a send.
        count: Number of messages.
        nbytes: Bytes of all tensors that the rank puts in.
    """

    axis: str
    content: str
    operation: Operation
    num_ranks: int
    count: int
    nbytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that the rank sends, in a ring: (k - 1) / k of its tensor, twice that for an all-reduce."""
        size = self.num_ranks
        share = (size - 1) / size
        factors = {"send": 1.0, "all_reduce": 2 * share, "all_gather": size - 1.0}
        return factors.get(self.operation, share) * self.nbytes


class Footprint(NamedTuple):
    """Bytes that a rank holds of its parameters.

    Attributes:
        parameters: Between steps.
        gradients: Between steps.
        gathered: During a step besides: full parameters, and gradients that are not reduced yet.
    """

    parameters: int
    gradients: int
    gathered: int


class Active:
    """What a technique does while steps run.

    Attributes:
        reduces_gradients: Whether it averages gradients over replicas, in place of the reducers.
    """

    reduces_gradients = False

    @property
    def groups(self) -> Sequence[Any]:
        """Parameters that are gathered and reduced together, each with its messages."""
        return ()

    @property
    def regions(self) -> dict[int, Any]:
        """Parts of files in which parameters are, by id of the parameter."""
        return {}

    # -- around steps --------------------------------------------------------------------------------------------------

    def step(self, num_microbatches: int = 0) -> AbstractContextManager[None]:
        """Around a step with so many backwards of each stage here; 0: without any."""
        return nullcontext()

    def user_step(self, are_averaged: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around a step that calls backwards and optimizers itself; ``are_averaged``: if gradients are averages."""
        return nullcontext()

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Begin a backward of a stage of this rank; the last one completes the gradients of the step."""

    def after_backward(self, stage: int, is_last: bool) -> None:
        """End a backward."""

    def begin_evaluation(self) -> None:
        """Begin batches that replicas run without each other; collective."""

    def end_evaluation(self) -> None:
        """End them."""

    # -- around layers -------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """Replace the forwards of layers inside."""
        return nullcontext()

    def settle(self) -> None:
        """Join what other ranks still do in their layers; collective."""

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        """Around code outside of layers that uses a module's parameters, and saves them for a backward."""
        return nullcontext()

    def step_in_backward(self, step: Callable[[AbstractContextManager[list[nn.Parameter]]], None]) -> None:
        """Call ``step`` with contexts in which parameters hold final gradients, once they have them."""

    # -- reads on one rank ---------------------------------------------------------------------------------------------

    def allow_rank_local_reads(self, mesh: Any) -> None:
        """Let code outside steps read parameters on some ranks only, from now on; collective over the world."""

    def gather_for_this_rank(self, parameter: Tensor) -> None:
        """Gather a parameter, of any shape, for such code."""

    def free_rank_local_reads(self) -> None:
        """End such code; collective."""


class Technique:
    """A technique that a run uses, under one layout.

    Attributes:
        option: How a user sets it, for messages.
        shardings: The shardings that it has added, of parameters that are gathered for a step.
    """

    option = ""
    shardings: tuple[AxisSharding, ...] = ()

    def place(self, run: Any, earlier: Sequence[AxisSharding]) -> Sequence[AxisSharding]:
        """Return the shardings of parameters that it adds to those of earlier techniques."""
        return ()

    def build(self, run: Any, partition: Any) -> Active:
        """Connect it to the local shards of parameters."""
        return Active()

    def of_rank(self, shardings: Mapping[int, AxisSharding]) -> Technique:
        """Return it as another rank has it, with these shardings by the ids of those here."""
        return self

    def step_in_user_step(self, run: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Connect optimizers that the user's step calls; return those that step full parameters on every rank."""
        return []

    def gathers_per_layer(self, run: Any) -> bool:
        """Return whether parameters are full one layer after the other."""
        return False

    def lines(self, run: Any) -> list[str]:
        """Return its lines of the start table."""
        return []

    def footprint(self, run: Any, parameters: Sequence[Any]) -> Footprint | None:
        """Return what a rank holds of its parameters, and for a moment; None where it changes nothing."""
        return None

    def messages(self, run: Any, num_microbatches: int, layer_reads: Collection[str]) -> Iterable[Messages]:
        """Return the messages of a step that it sends."""
        return ()
