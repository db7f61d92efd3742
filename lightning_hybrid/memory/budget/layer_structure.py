"""One run of a layer as numbers: its operations, the values that they make, and which of these autograd saved."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning_hybrid.memory.knapsack import Step
from lightning_hybrid.memory.recomputable_values_and_operations import Value
from lightning_hybrid.memory.recomputation_tape import Tape
from lightning_hybrid.memory.selective_activation_checkpointing import results_of, step_of

OUTSIDE = -1  # a saved tensor that no operation of the layer made


@dataclass(frozen=True)
class Result:
    """One value that an operation of the layer made.

    Attributes:
        operation: Number of that operation.
        nbytes: Its bytes.
        is_elsewhere: Whether something outside of the tape keeps it, so that it takes no further memory.
        is_permanent: Whether it has no recipe, whatever is chosen.
        is_intermediate: Whether one operation reads it and autograd does not save it: it is dropped once it is read.
    """

    operation: int
    nbytes: int
    is_elsewhere: bool
    is_permanent: bool
    is_intermediate: bool


@dataclass(frozen=True)
class LayerStructure:
    """One run of a layer.

    Attributes:
        names: The operators, in order.
        steps: Cost and size of each operation.
        reads: By operation, the results that it reads.
        overwrites: By operation, whether it writes to the first result that it reads, or to a copy of that.
        results: The values that operations made and that autograd or other operations may still read.
        saves: For each tensor that autograd saved, in order, its result, or `OUTSIDE`.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    reads: tuple[tuple[int, ...], ...]
    overwrites: tuple[bool, ...]
    results: tuple[Result, ...]
    saves: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        """Equal for runs of the same operations on tensors of any sizes."""
        return self.names, tuple(step.is_saved for step in self.steps)

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves of the results if nothing is recomputed."""
        results = (self.results[number] for number in set(self.saves) if number != OUTSIDE)
        return sum(result.nbytes for result in results if not result.is_elsewhere)

    @property
    def saved_operations(self) -> frozenset[int]:
        """The operations of which autograd saves a result."""
        return frozenset(self.results[number].operation for number in self.saves if number != OUTSIDE)

    @property
    def unavoidable(self) -> frozenset[int]:
        """The operations whose results stay in memory anyway."""
        return frozenset(number for number, step in enumerate(self.steps) if step.is_free and step.may_keep)


def structure_of(tape: Tape, saved: Sequence[int]) -> LayerStructure:
    """Return the structure of a run that is on a tape, before the tape drops any tensor.

    Args:
        tape: Of the run.
        saved: For each tensor that autograd saved, in order, the id of its `Value`; 0 for others.
    """
    operations = tape.operations
    operation_of = {id(value): n for n, operation in enumerate(operations) for value in results_of(operation)}
    results = [value for operation in operations for value in results_of(operation)]
    index_of = {id(value): index for index, value in enumerate(results)}
    return LayerStructure(
        names=tuple(str(operation.function) for operation in operations),
        steps=tuple(step_of(operation, operation_of) for operation in operations),
        reads=tuple(
            tuple(index_of[id(value)] for value in operation.reads if id(value) in index_of) for operation in operations
        ),
        overwrites=tuple(operation.writes_first for operation in operations),
        results=tuple(_result(value, operation_of[id(value)]) for value in results),
        saves=tuple(index_of.get(address, OUTSIDE) for address in saved),
    )


def _result(value: Value, operation: int) -> Result:
    return Result(
        operation=operation,
        nbytes=value.nbytes,
        is_elsewhere=value.is_pinned or (value.is_returned and value.num_saved > 0),
        is_permanent=value.is_pinned,
        is_intermediate=value.num_reads == 1 and not value.num_saved,
    )
