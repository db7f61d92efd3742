"""A second run of a step for its Python side effects only: ``self.losses.append(loss.item())``.

In a single process the numbers of a step are available when its Python reads them. On a rank of a pipeline they are
received after the step. So a step that stores or returns numbers of the model runs on its full batch, and once the
numbers are on every rank it runs again without the model's arithmetic, and reads the exchanged numbers. The changes of
that run on the modules stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.errors import StepError
from lightning_hybrid.pipeline.runtime.executor import fill_placeholders
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.select_recorded_trace import Call
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot, TensorSnapshot
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.recording.kept import skippable_modules
from lightning_hybrid.step.standins.tensors import is_absent


class SideEffectRun:
    """The second run of one step on one batch; created before the step runs."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        call: Call,
        batch: Any,
        variant: TraceVariant,
        randomness: KeyedRandomness,
    ) -> None:
        """Snapshot the modules.

        Args:
            root: The user's module.
            names: FQN by id of its parameters and tracked buffers.
            call: The call of the step.
            batch: The full batch.
            variant: The trace of the step.
            randomness: Keys the random numbers of the step.
        """
        self._root, self._names, self._call, self._batch = root, names, call, batch
        self._variant, self._randomness = variant, randomness
        self._without = skippable_modules(root, [variant.recording])
        self._start = ModuleSnapshot(root, without=self._without)
        self._watched = [(tensor, tensor._version) for tensor in tensors_inside(batch)]

    def returned(self, contents: Mapping[int, Tensor]) -> Any:
        """Run the step again, and return its output.

        Args:
            contents: The values of the model that all ranks have, by index, in their shapes.

        Raises:
            StepError: The step cannot run so.
        """
        kept = self._variant.recording.numbers_kept
        if any(tensor._version != version for tensor, version in self._watched):
            raise StepError(
                f"{kept}, and the step writes into its batch in place; let it write into a copy",
                entry="side-effects-batch",
            )
        written = _Buffers(self._root, self._without)
        self._start.restore()  # the step may have branched on a buffer that it has written since
        try:
            run = self._call.rerun(self._root, self._names, self._batch, self._variant, self._randomness, contents)
        except Exception as error:
            raise StepError(
                f"{kept}, and the step failed where only its side effects run ({type(error).__name__}: {error});"
                " make the step do the same each time it runs on a batch, or keep the tensor (loss.detach()) instead",
                entry="side-effects",
            ) from error
        finally:
            written.restore()
        fill_placeholders(run, contents)
        return run.result


class _Buffers:
    """A snapshot of the buffers that user code around layers may write, after the step."""

    def __init__(self, root: nn.Module, without: set[nn.Module]) -> None:
        dicts = [module._buffers for module in root.modules() if module not in without]
        self._dicts = [(buffers, dict(buffers)) for buffers in dicts]
        present = {id(b): b for buffers in dicts for b in buffers.values() if b is not None and not is_absent(b)}
        self._contents = [TensorSnapshot(buffer) for buffer in present.values()]

    def restore(self) -> None:
        """Restore the buffers and their contents."""
        for buffers, members in self._dicts:
            buffers.clear()
            buffers.update(members)
        for content in self._contents:
            content.restore()
