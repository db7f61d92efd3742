"""What a technique does to a run: decided once for a layout, and active in its steps.

A strategy, a dry run and the start table know only these two classes; each method does nothing by default.

    decided   ``Technique``  watching the first step -> place: shards of this rank -> decide -> lines, messages
    active    ``Active``     from ``build``: around steps, layers, backwards, and other code that reads parameters
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.predict.ranks import Footprint, Place, RankMemory

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


class Active:
    """What a technique does while steps run.

    Attributes:
        reduces_gradients: Whether it averages gradients over replicas, in place of the reducers.
        keeps_compiled: Whether its layers run so in evaluation too, and until the backward is over, where the user's
            step runs unchanged.
        can_roll_back: Whether a step may end in the middle, on all ranks, and run again.
        replaces_layers: Whether layers run otherwise than the user wrote them.
        guards_loaders: Whether loaders may read its parameters on some ranks only.
    """

    reduces_gradients = False
    keeps_compiled = False
    can_roll_back = True
    guards_loaders = True
    replaces_layers = False

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

    def complete_gradients(self) -> None:
        """Finish the gradients of a step, which are averaged over replicas; collective."""

    def around_step(self) -> AbstractContextManager[Any]:
        """Around one run of the user's step: in it, code outside of layers reads parameters."""
        return nullcontext()

    def unpartitioned(self) -> AbstractContextManager[None]:
        """Around an evaluation step that each replica runs by itself."""
        return nullcontext()

    def begin_evaluation(self, is_even: bool) -> None:
        """Begin batches that replicas run without each other, or as many on each (``is_even``); collective."""

    def end_evaluation(self) -> None:
        """End them."""

    # -- around layers -------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """Replace the forwards of layers inside."""
        return nullcontext()

    def settle(self) -> None:
        """Join what other ranks still do in their layers; collective."""

    def forget(self) -> None:
        """Layers hold full parameters from now on."""

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
        records: Whether it needs the recording of the first step.
        changes_gradients: Whether it needs the complete gradients of a step.
        shares_layers: Whether it may shard layers over tensor ranks.
        shards: How this rank runs its shards of layers, if it does.
        storing: Stores what layers save for the backward, if it does.
        budget: Chooses its policies once bytes of layers are measured, if anything does.
    """

    option = ""
    shardings: tuple[AxisSharding, ...] = ()
    records = False
    changes_gradients = False
    shares_layers = False

    shards: Any = None
    storing: Any = None
    budget: Any = None

    # -- decided before anything changes -------------------------------------------------------------------------------

    def watches(self, run: Any) -> bool:
        """Return whether it observes the recording of a step."""
        return self.records

    def watching(self, variant: Any) -> AbstractContextManager[None]:
        """Around the recording of a step, as a ``TraceVariant``."""
        return nullcontext()

    def place(self, run: Any, earlier: Sequence[AxisSharding]) -> Sequence[AxisSharding]:
        """Return the shardings of parameters that it adds to the shardings of inner techniques; collective."""
        return ()

    def decide(self, run: Any) -> None:
        """Choose what it does to layers, once a step is recorded and the shards are known."""

    def of_rank(self, shardings: Mapping[int, AxisSharding]) -> Technique:
        """Return it as another rank has it, with these shardings by the ids of this rank's shardings."""
        return self

    # -- in a run ------------------------------------------------------------------------------------------------------

    def build(self, run: Any, owner: Any) -> Active:
        """Connect it to the local shards of parameters."""
        return Active()

    def connect(self, run: Any, optimization: Any) -> None:
        """Connect it to the reducers and optimizers of a run."""

    def steps_alone(self, run: Any) -> bool:
        """Return whether the next step of each replica is its own: parameters and states of optimizers differ then."""
        return False

    def kept(self) -> Callable[[], None]:
        """Return a function that restores what steps change of it, after one that is rolled back."""
        return lambda: None

    def carry(self, run: Any, gather: Callable[[Optimizer], dict[str, Any]]) -> None:
        """Keep its state while the layout of a run changes; collective over the world.

        ``gather`` returns the full state dict of an optimizer on the first rank.
        """

    def step_in_user_step(self, run: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Connect optimizers that the user's step calls; return the ones that step full parameters on every rank."""
        return []

    def check_optimizers(self, run: Any, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that it cannot serve, before anything is connected."""

    def move_states(self, run: Any, optimizers: Sequence[Optimizer], watched: Sequence[Optimizer]) -> Sequence[Any]:
        """Let states be elsewhere between steps; ``watched`` are optimizers that may combine parameters.

        Returns their ``MovedStates``.
        """
        return ()

    # -- what other techniques and tables ask --------------------------------------------------------------------------

    @property
    def policies(self) -> Mapping[str, Any]:
        """What layers save for the backward, by FQN; everything where it is not named."""
        return {}

    @property
    def plans(self) -> Mapping[str, Any]:
        """How layers are sharded, by FQN."""
        return {}

    def expect(
        self, memory: list[RankMemory], without: list[RankMemory], rank_of: Callable[[int], int]
    ) -> list[RankMemory]:
        """Return the memory of each stage as its budget is expected to choose, between the least and that without it.

        ``rank_of`` returns the pipeline rank of a stage.
        """
        return memory

    def inseparable(self) -> Collection[nn.Module]:
        """Modules whose children are no layers of their own."""
        return ()

    def unequally_read(self) -> Collection[str]:
        """FQNs of parameters that ranks read unequally often: no layer may gather them by a collective."""
        return ()

    def gathers_per_layer(self, run: Any) -> bool:
        """Return whether parameters are full one layer after the other."""
        return False

    def details(self, run: Any) -> list[str]:
        """Return its lines of the start table on single layers."""
        return []

    def lines(self, run: Any) -> list[str]:
        """Return its lines of the start table."""
        return []

    def places(self, run: Any) -> Mapping[str, Place]:
        """Return which of "parameters", "gradients" and "optimizer_states" are outside of the compute device."""
        return {}

    def footprint(self, run: Any, parameters: Sequence[Any]) -> Footprint | None:
        """Return what a rank holds of its parameters, and for a moment; None where it changes nothing."""
        return None

    def activation_share(self, run: Any) -> float:
        """Return the share of a step's activations that a rank holds, in an estimate."""
        return 1.0

    def messages(self, run: Any, num_microbatches: int) -> Iterable[Messages]:
        """Return the messages of a step that it sends."""
        return ()
