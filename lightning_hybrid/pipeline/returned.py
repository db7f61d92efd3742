"""What a step returned for the microbatches becomes what one process returns for the batch.

Tensors with the samples first are concatenated (``step.joined``). Whatever else a step returns is taken from a run of
its bookkeeping on the whole batch (``whole_batch``). Where the step cannot run there, as one that loops over its
samples, the bookkeeping runs on each microbatch for the numbers that the step returns, and what it gave is joined.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_hybrid.pipeline.once_more import OnceMore
from lightning_hybrid.step.absent import AbsentFloat, is_absent, values_behind
from lightning_hybrid.step.absent_content import AbsentArray
from lightning_hybrid.step.bookkeeping import BookkeepingReplay, is_of_all_samples
from lightning_hybrid.step.joined import UNKNOWN, join
from lightning_hybrid.step.recording import Recording, ReturnedTensor, StepError
from lightning_hybrid.step.tree import children_of, flatten, map_leaves


@dataclass(frozen=True)
class Results:
    """Of the microbatches of one step.

    Attributes:
        step: Its name.
        outputs: What each returned, without its graph; empty if that is the loss alone.
        contents: By microbatch, the shared values by index.
        weights: Shares of the samples.
        sizes: Numbers of samples, if known; empty with the outputs.
    """

    step: str
    outputs: Sequence[Any]
    contents: Sequence[Mapping[int, Tensor]]
    weights: Sequence[float]
    sizes: Sequence[int | None]

    def joined(self, whole: Any = UNKNOWN) -> Any:
        """The outputs put together; ``whole`` is what the step returned for the whole batch."""
        if not self.outputs:
            return None
        return join(self.outputs, self.weights, self.sizes, whole=whole, step=self.step)


def is_doubtful(recording: Recording, samples: int | None) -> bool:
    """Whether the number of samples of a microbatch leaves a doubt about what its step returns for the whole batch.

    Args:
        recording: Of the step on a microbatch.
        samples: Of the microbatch.
    """
    if samples is None:
        return False
    graph = recording.graph
    counts = any(node.name == "bincount" for node in graph.nodes)  # of a length that depends on data, not on samples

    def doubtful(value: Any) -> bool:
        if isinstance(value, ReturnedTensor):
            if value.shape:
                dynamic = value.value is not None and graph.values[value.value].dynamic
                return value.shape[0] != samples and (not dynamic or counts)
            if value.value is None or value.value == graph.loss:
                return False
            exact = not graph.values[value.value].dtype.startswith(("float", "bfloat", "complex"))
            return exact or is_of_all_samples(value.value, graph, samples)
        parts = children_of(value)
        if parts is None:
            return type(value) is int and value == samples
        return (isinstance(value, list | tuple) and len(value) == samples) or any(map(doubtful, parts[0]))

    return doubtful(recording.returns)


def completed(output: Any, whole: Any) -> Any:
    """A joined output with all that the whole batch gave; the tensors that it did not give were not asked for there.

    Args:
        output: Of the microbatches, joined.
        whole: What the step returned for the whole batch.
    """
    if not any(is_absent(leaf) for leaf in flatten(whole)[0]):
        return map_leaves(detached, whole)
    ours, theirs = children_of(output), children_of(whole)
    if ours is None or theirs is None:
        return output
    if isinstance(output, Mapping) and isinstance(whole, Mapping):
        entries = [completed(output[key], whole[key]) if key in output else whole[key] for key in whole]
        return theirs[1](entries)
    if len(ours[0]) != len(theirs[0]):
        return output
    return theirs[1]([completed(one, other) for one, other in zip(ours[0], theirs[0], strict=True)])


def detached(leaf: Any) -> Any:
    """A leaf of an output without its graph; None where its content was not asked for."""
    if isinstance(leaf, Tensor):
        return None if is_absent(leaf) else leaf.detach()
    return leaf


def handed_back(batch: Any, microbatches: Sequence[Any], results: Sequence[Any], output: Any) -> Any:
    """What a step returns that returns its own batch, with what it has put there: the batch, with the same.

    Args:
        batch: The whole batch.
        microbatches: What the step ran on.
        results: What it returned for each.
        output: These, joined.
    """
    if not all(result is microbatch for result, microbatch in zip(results, microbatches, strict=True)):
        return output
    if isinstance(batch, MutableMapping):
        batch.update(output)
        return batch
    if not isinstance(batch, Tensor) and hasattr(batch, "__dict__"):
        vars(batch).update(vars(output))
        return batch
    return output


def check_content(step: str, output: Any) -> None:
    """See that no stand-in reaches the user.

    Args:
        step: Its name.
        output: What it returned, joined.

    Raises:
        StepError: A number is not known on this rank.
    """
    for leaf in flatten(output)[0]:
        if isinstance(leaf, AbsentFloat | AbsentArray) or values_behind(leaf) is not None:
            line = leaf.line if isinstance(leaf, AbsentFloat | AbsentArray) else step
            raise StepError(
                f"{line}: {step} returns a number read from the model that is not known for the whole batch; return the"
                " tensor instead (loss.detach()), or set num_microbatches=1"
            )


class EachMicrobatch:
    """The numbers that a step returns for each microbatch, where it keeps nothing else and cannot run on the batch."""

    def __init__(self, again: OnceMore, replays: Sequence[BookkeepingReplay], parts: Sequence[Any]) -> None:
        """Args: again: runs the step. replays: of each microbatch. parts: the microbatches."""
        self._again, self._replays, self._parts = again, replays, parts

    def before_microbatch(self) -> None:
        """Each sees the modules as the batch found them."""
        self._again.start_again()

    def finish(self, results: Results) -> Any:
        """After the last microbatch: what the step returned, with its numbers.

        Args:
            results: Of the microbatches.

        Raises:
            StepError: The step cannot run once more.
        """
        self._again.check_batch()
        end, outputs = self._again.state(), []
        for place, (replay, part) in enumerate(zip(self._replays, self._parts, strict=True)):
            content = results.contents[place]
            whole = self._again.run(replay, part, place, dict(content))
            outputs.append(completed(results.outputs[place], whole))
        end.restore()
        return join(outputs, results.weights, results.sizes, step=results.step)
