"""The exceptions of the package: `HybridError` and its subclasses, which are also built-in errors.

    try:
        trainer.fit(module)
    except HybridError as error:
        print(error.docs)  # errors.md#world-size

The room is plain Python: it imports neither torch nor Lightning. A wrong value of an argument that no class below
describes raises a plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# The last alternative that a message advises for a step that cannot run in stages.
WITHOUT_STAGES = (
    "set pipeline_parallel_size=1 and zero_stage=3 (replicas run the step as ordinary Python, and hold shards)"
)
_POINTER = "<-- ERROR HERE"


class HybridError(Exception):
    """The base class of the exceptions of lightning_hybrid.

    Attributes:
        docs: Where the documentation explains the message, with its cause and what to do, as a path below the folder of
            the documentation; that of its class where the message has no entry of its own.
    """

    docs: str = "errors.md"

    def __init_subclass__(cls) -> None:
        cls.docs = f"reference/exceptions.md#{cls.__name__.lower()}"

    def __init__(self, *args: object, entry: str = "") -> None:
        """Make an error whose note names its entry."""
        super().__init__(*args)
        if entry:
            self.docs = f"errors.md#{entry}"
            self.__notes__ = [f"explained by: lightning-hybrid explain-error {entry}"]


# -- arguments, before the first step ----------------------------------------------------------------------------------


class LayoutError(HybridError, ValueError):
    """The sizes of a layout do not fit each other, the number of processes, or (``strict_layout=True``) the module."""


class PlanError(HybridError, ValueError):
    """The planner finds no layout of a model that fits a cluster, or there is no such cluster."""


class RecomputeError(HybridError, ValueError):
    """The layers that ``recompute`` names do not exist, the module has no layers, or a budget is below the floor."""


class ActivationError(HybridError, ValueError):
    """Saved activations cannot be offloaded or compressed as requested."""


class Float8Error(HybridError, ValueError):
    """Linear layers cannot multiply in float8 as requested."""


class QuantizedStatesError(HybridError, ValueError):
    """An optimizer with quantized states cannot be used with these options."""


class TensorPlanError(HybridError, ValueError):
    """A ``tensor_parallel_plan`` names no module, or requests what cannot be done or is not proved.

    Also with ``strict_layout=True``: tensor ranks do not divide a layer.
    """


class ScheduleError(HybridError, ValueError):
    """A schedule or program cannot run as written; the package's own can."""

    @classmethod
    def at(
        cls,
        summary: str,
        rows: Sequence[Iterable[object]],
        positions: Mapping[int, int] | None = None,
        details: Iterable[str] = (),
        *,
        entry: str = "",
    ) -> ScheduleError:
        """Make an error that shows every rank's row, pointing at one position in some of them.

        Args:
            summary: What is wrong, in a line.
            rows: For every rank, what it does; each entry is shown by its `str`.
            positions: For the offending ranks, the index into their row.
            details: Further lines, such as what each rank waits for.
            entry: Anchor of the message in docs/errors.md.
        """
        positions = positions or {}
        lines = [summary, *(f"  {detail}" for detail in details)]
        for rank, row in enumerate(rows):
            words = [str(entry) for entry in row]
            if rank in positions:
                words.insert(positions[rank] + 1, _POINTER)
            lines.append(f"rank {rank}: {'  '.join(words)}")
        return cls("\n".join(lines), entry=entry)


class InitialValueError(HybridError, RuntimeError):
    """A parameter or buffer on the meta device has no initial value when training starts."""


# -- the step as it is recorded, cut into stages and replayed ----------------------------------------------------------


class StepError(HybridError, ValueError):
    """A step that cannot be recorded, or cannot be run as it was recorded."""


class UncapturedOutput(StepError):
    """Code around units reads a value of the model that a call of a unit stored in its attributes (captured output).

    Attributes:
        unit: FQN of the unit; if it is opened, its code is glue and each of its operations is recorded.
    """

    def __init__(self, unit: str, message: str, *, entry: str = "") -> None:
        super().__init__(message, entry=entry)
        self.unit = unit

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with both arguments, and with the notes."""
        return type(self), (self.unit, *self.args), self.__dict__


class LossError(StepError):
    """A training step returns no loss, or one of several numbers, as no layout, nor one process, could train with."""


class StepChanged(StepError):
    """A training step runs other operations, or makes values of other shapes, than when it was recorded."""


class ControlFlowError(HybridError, RuntimeError):
    """A step branches on a value that the model computes, where that value is on another rank or not computed yet."""


class PartitionError(HybridError, ValueError):
    """A recorded step that cannot be cut into the requested number of stages."""


class UnfitError(PartitionError):
    """The number of stages, or a name in ``pipeline_cuts``, does not fit the step.

    Attributes:
        reads: Names of the parameters and buffers that the step reads, where it has too few units.
    """

    def __init__(self, *args: object, entry: str = "", reads: Iterable[str] = ()) -> None:
        """Make an error of a step that reads these parameters."""
        super().__init__(*args, entry=entry)
        self.reads = frozenset(reads)


class BatchError(HybridError, ValueError):
    """A batch that cannot be split into microbatches as requested, or whose microbatches cannot be weighted."""


class FirstStepError(HybridError, RuntimeError):
    """With ``verify_first_step=True``: the first step does not match one process, or one process cannot run it."""


# -- sharded layers and experts ----------------------------------------------------------------------------------------


class CannotShard(HybridError, RuntimeError):
    """Code of a sharded layer does something whose sharded result cannot be derived from the proof of its plan."""


class UnsupportedExpertCalls(HybridError, RuntimeError):
    """A block calls its experts in another way than in the proof that they can be sharded."""


class UnequalMicrobatches(HybridError, RuntimeError):
    """Ranks that share experts have different numbers of microbatches; raised on all of them."""


# -- ranks that do not do the same -------------------------------------------------------------------------------------


class RanksDisagree(HybridError, RuntimeError):
    """Ranks that must do the same have different batches, log different keys, or run different operations."""


class RanksDiffer(HybridError, RuntimeError):
    """Replicas that shard the same parameters are about to train different ones; raised on every rank."""


class RankOutOfMemory(HybridError, RuntimeError):
    """A rank ran out of memory in a step; raised on all ranks, when none waits for another.

    Lightning takes it for an out-of-memory error.
    """


class NotOnAllRanks(HybridError, RuntimeError):
    """Only some ranks make a call that all must make, such as ``trainer.save_checkpoint``."""


# -- state that is on other ranks, in memory and in files --------------------------------------------------------------


class GlobalReadError(HybridError, RuntimeError):
    """A hook requests what is not available of a model that is sharded over ranks."""


class NotOnThisRank(HybridError, pickle.PicklingError):
    """A copy or pickle is requested of a parameter whose content is on other ranks."""


class OffloadError(HybridError, OSError):
    """The file for offloaded states or parameters cannot be created or extended, or has been truncated."""


class BackwardStepError(HybridError, ValueError):
    """``optimizer_in_backward=True`` cannot step this optimizer, or code may read gradients that it has freed."""


class PrecisionError(HybridError, ValueError):
    """The device has no arithmetic of a precision, or an option of a precision does not fit the run."""


class CheckpointError(HybridError, RuntimeError):
    """A checkpoint cannot be written, is not valid, or does not fit the module or optimizer."""


class IncompleteCheckpoint(CheckpointError):
    """A save to the checkpoint did not end, or files of its folder are missing or truncated."""


def is_name_of_error(name: str) -> bool:
    """Whether this is the name of one of these classes."""
    kind = globals().get(name)
    return isinstance(kind, type) and issubclass(kind, HybridError)


# -- errors of others --------------------------------------------------------------------------------------------------

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory could not be allocated."""
    return any(_says_so(each) for each in causes_of(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # that of torch
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def add_error_note(error: BaseException, text: str) -> None:
    """Add a note to an error; before Python 3.11 it is stored but not printed.

    Args:
        error: The error that propagates.
        text: One line.
    """
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        vars(error)["__notes__"] = [*error_notes_of(error), text]


def error_notes_of(error: BaseException) -> list[str]:
    """The notes of an error, oldest first."""
    return list(getattr(error, "__notes__", ()))
