"""A second run of a step for its Python side effects alone: ``self.losses.append(loss.item())``.

In one process the numbers of a step are there when its Python asks for them. On a rank of a pipeline they are known
after the step. So a step that keeps or returns numbers of the model runs on its whole batch, and once the numbers are
known on every rank it runs again without any of the model's arithmetic: what it reads then is what the ranks have
shared. What that run leaves on the modules stays.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.runtime.executor import fill_placeholders
from lightning_hybrid.pipeline.stages.trace_cache import Call
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.instrument import installed
from lightning_hybrid.step.module_state.snapshot import Content, ModuleState
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.recording.kept_values import without_state
from lightning_hybrid.step.replay.side_effect_replay import SideEffectReplay
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError


class SideEffectRun:
    """That of one step on one batch; made before the step runs."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        call: Call,
        batch: Any,
        variant: Variant,
        randomness: KeyedRandomness,
    ) -> None:
        """Note how the modules are.

        Args:
            root: The user's module.
            names: FQN by id of what it holds.
            call: Of the step.
            batch: The whole batch.
            variant: The recorded form of the step.
            randomness: Keys what the step draws.
        """
        self._root, self._names, self._call, self._batch = root, names, call, batch
        self._variant, self._randomness = variant, randomness
        self._without = without_state(root, [variant.recording])
        self._start = ModuleState(root, without=self._without)
        self._watched = [(tensor, tensor._version) for tensor in tensors_inside(batch)]

    def returned(self, contents: Mapping[int, Tensor]) -> Any:
        """Run it.

        Args:
            contents: The values of the model that all ranks know, by index.

        Returns:
            What the step returns.

        Raises:
            StepError: It cannot run.
        """
        kept = self._variant.recording.numbers_kept
        if any(tensor._version != version for tensor, version in self._watched):
            raise StepError(f"{kept}, and the step writes into its batch in place; let it write into a copy")
        written = _Buffers(self._root, self._without)
        self._start.restore()  # the step may have gone by a buffer that it has written since
        replay = SideEffectReplay(self._variant.recording, self._variant.assignment, self._root, self._randomness)
        replay.contents = contents
        try:
            with (
                installed([replay], self._randomness) as current,
                self._randomness.isolated(),
                self._randomness.microbatch(self._call.number, self._call.first),
                self._call.context(),
                replaced(self._root, "log", lambda *_, **__: None),
                contextlib.redirect_stdout(io.StringIO()),  # the step has printed
            ):
                run = replay.run(lambda: self._call.on(self._batch), {}, self._names, current)
        except Exception as error:
            raise StepError(
                f"{kept}, and the step failed where only its side effects run ({type(error).__name__}: {error})"
            ) from error
        finally:
            written.restore()
        fill_placeholders(run, contents)
        return run.result


class _Buffers:
    """The buffers that the user's code around layers may write, as the step has left them."""

    def __init__(self, root: nn.Module, without: set[nn.Module]) -> None:
        holders = [module._buffers for module in root.modules() if module not in without]
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
