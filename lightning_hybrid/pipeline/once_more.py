"""Run a user's step once more, for its bookkeeping alone, as if nothing but that had happened."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.choice import Call
from lightning_hybrid.pipeline.executor import fill_placeholders
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.bookkeeping import BookkeepingReplay
from lightning_hybrid.step.installed import installed
from lightning_hybrid.step.recording import Recording, StepError
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
        recordings: Sequence[Recording],
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
            recordings: Of the step; they say where it keeps values of the model.
        """
        self._root, self._names, self._call, self._batch = root, names, call, batch
        self.kept, self._without = kept, without
        self._start, self._caches = self.state(), _Caches(root, without, recordings)
        self._watched = tensors_inside((batch, microbatches))
        self._versions = [tensor._version for tensor in self._watched]

    def state(self) -> ModuleState:
        """What the modules hold now."""
        return ModuleState(self._root, buffers=False, without=self._without)

    def start_again(self) -> None:
        """Put the modules back as the batch found them."""
        self._start.restore()
        self._caches.restore()

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
        buffers = _Buffers(self._root, self._without, self._caches)
        replay.contents = contents
        try:
            with (
                installed([replay], randomness) as current,
                randomness.isolated(),
                randomness.microbatch(self._call.number, self._call.first + place),
                self._call.context(),
                replaced(self._root, "log", lambda *_, **__: None),
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


class _Caches:
    """Buffers that the step binds to tensors of other sizes, made without the model: a mask for so many samples.

    They go with the attributes that tell for how many samples they are.
    """

    def __init__(self, root: nn.Module, without: set[nn.Module], recordings: Sequence[Recording]) -> None:
        places = [place for recording in recordings for place, _ in recording.kept if place.attribute == "_buffers"]
        of_model = {(place.module, place.path[0]) for place in places}
        self._bound = {
            id(module._buffers): (
                module._buffers,
                {name: held for name, held in module._buffers.items() if (fqn, name) not in of_model},
            )
            for fqn, module in root.named_modules()
            if module._buffers and module not in without
        }

    def restore(self) -> None:
        """Bind them to what they were, or to nothing."""
        for holder, members in self._bound.values():
            for name, before in members.items():
                if _is_resized(before, holder.get(name)):
                    holder[name] = before

    def among(self, holder: dict[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
        """Those that a module holds now, if they had other sizes in ``members``."""
        known = self._bound.get(id(holder), (holder, {}))[1]
        return {name: holder[name] for name in known if _is_resized(members.get(name), holder.get(name))}


class _Buffers:
    """The buffers that glue may write; the microbatches have done that."""

    def __init__(self, root: nn.Module, without: set[nn.Module], caches: _Caches) -> None:
        holders = [module._buffers for module in root.modules() if module not in without]
        self._caches = caches
        self._holders = [(holder, dict(holder)) for holder in holders]
        held = {id(b): b for holder in holders for b in holder.values() if b is not None and not is_absent(b)}
        self._contents = [Content(buffer) for buffer in held.values()]

    def restore(self) -> None:
        """Put them back as they were, but for caches."""
        for holder, members in self._holders:
            caches = self._caches.among(holder, members)
            holder.clear()
            holder.update({**members, **caches})
        for content in self._contents:
            content.restore()


def _is_resized(before: Tensor | None, now: Tensor | None) -> bool:
    return now is not None and now is not before and (before is None or now.shape != before.shape)
