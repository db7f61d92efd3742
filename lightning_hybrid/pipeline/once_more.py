"""Run a user's step once more, for its bookkeeping alone, as if nothing but that had happened."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.pipeline.choice import Call
from lightning_hybrid.pipeline.executor import fill_placeholders
from lightning_hybrid.pipeline.logs import replaced_log
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.bookkeeping import BookkeepingReplay
from lightning_hybrid.step.installed import installed
from lightning_hybrid.step.recording import StepError
from lightning_hybrid.step.transaction import Content, ModuleState
from lightning_hybrid.step.tree import tensors_inside


class OnceMore:
    """Runs one step so; made before the step runs."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        call: Call,
        batch: Any,
        microbatches: Sequence[Any],
        kept: str,
        without: set[nn.Module],
    ) -> None:
        """Take down how the modules are.

        Args:
            root: The user's module.
            names: FQN by id of what it holds.
            call: Of the step.
            batch: The whole batch.
            microbatches: What the step runs on.
            kept: What the step keeps, and where; for messages.
            without: Modules whose attributes are not its bookkeeping.
        """
        self._root, self._names, self._call, self._batch = root, names, call, batch
        self.kept, self._without = kept, without
        self._start = self.state()
        self._watched = tensors_inside((batch, microbatches))
        self._versions = [tensor._version for tensor in self._watched]

    def state(self) -> ModuleState:
        """What the modules hold now."""
        return ModuleState(self._root, buffers=False, without=self._without)

    def start_again(self) -> None:
        """Put the modules back as the batch found them."""
        self._start.restore()

    def check_batch(self) -> None:
        """Refuse a batch that the step has written into.

        Raises:
            StepError: It has.
        """
        if [tensor._version for tensor in self._watched] != self._versions:
            raise StepError(f"{self.kept}, and the step writes into its batch in place; let it write into a copy")

    def run(self, replay: BookkeepingReplay, batch: Any, place: int, contents: dict[int, Tensor]) -> Any:
        """What the step returns where only its bookkeeping is computed.

        Args:
            replay: Of the step.
            batch: The whole batch or a microbatch.
            place: Of the microbatch; 0 for the whole batch.
            contents: The values that are known.

        Raises:
            StepError: It cannot run.
        """
        randomness = replay.randomness
        what = "the whole batch" if batch is self._batch else f"microbatch {place}"
        self.start_again()
        buffers = _Buffers(self._root, self._without)
        replay.contents = contents
        try:
            with (
                installed([replay], randomness) as current,
                randomness.isolated(),
                randomness.microbatch(self._call.number, self._call.first + place),
                self._call.context(),
                replaced_log(self._root, lambda *_, **__: None),
                contextlib.redirect_stdout(io.StringIO()),  # the microbatches have printed
            ):
                run = replay.run(lambda: self._call.on(batch), {}, self._names, current)
        except Exception as error:
            raise StepError(
                f"{self.kept}, and the step failed on {what} where only what it keeps is computed"
                f" ({type(error).__name__}: {error}); set num_microbatches=1"
            ) from error
        finally:
            replay.contents = {}
            buffers.restore()
        fill_placeholders(run, contents)
        return run.result


class _Buffers:
    """The buffers that glue may write; the microbatches have done that."""

    def __init__(self, root: nn.Module, without: set[nn.Module]) -> None:
        passed = {id(module) for module in without}
        holders = [module._buffers for module in root.modules() if id(module) not in passed]
        self._holders = [(holder, dict(holder)) for holder in holders]
        held = {id(b): b for holder in holders for b in holder.values() if b is not None and not is_absent(b)}
        self._contents = [Content(buffer) for buffer in held.values()]

    def restore(self) -> None:
        """Put them back as they were."""
        for holder, members in self._holders:
            holder.clear()
            holder.update(members)
        for content in self._contents:
            content.restore()
