"""A snapshot of modules before a training step, for a rollback if the step diverges from its recording."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_hybrid.errors import StepError
from lightning_hybrid.step.module_state.snapshots import (
    MAX_COPIED,
    ModuleSnapshot,
    TensorSnapshot,
    can_restore,
    reachable_leaves,
)
from lightning_hybrid.step.objects.modules import modules_in
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.objects.tensors import detached_copy
from lightning_hybrid.step.standins.tensors import is_absent

_MAX_COPIED_OF_BATCH = 2**20


class StepSnapshot:
    """The state of all modules and metrics of one module before a step."""

    def __init__(
        self,
        root: nn.Module,
        written: Collection[str] = (),
        *,
        copied: float = MAX_COPIED,
        batches: Any = (None, ()),
        writes_batch: bool = False,
    ) -> None:
        """Copy the state before a step that writes the parameters of the FQNs ``written``.

        Attribute tensors of more than ``copied`` elements must not be written. ``batches`` are the batch and its
        microbatches, which share its memory; its large tensors are copied only if the step is known to write into it.
        """
        given = [tensor for tensor in tensors_inside(batches[0]) if can_restore(tensor)]
        small = [t for t in given if writes_batch or t.numel() <= _MAX_COPIED_OF_BATCH]
        self._batch = [(tensor.detach(), detached_copy(tensor)) for tensor in small]
        # Microbatches have version counters of their own.
        parts = tensors_inside(batches) if len(self._batch) < len(given) else ()
        self._unwritten = [(tensor, tensor._version) for tensor in parts]
        named = root.named_parameters() if written else ()
        self._written = [(p, detached_copy(p)) for name, p in named if name in written and not is_absent(p)]
        modules = [module for _, module in modules_in(root)]
        self._metrics = [module for module in modules if isinstance(module, Metric)]
        inside = {inner for metric in self._metrics for inner in metric.modules()}
        self._modules = ModuleSnapshot(root, without=inside, copied=copied)
        self._states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in self._metrics]
        leaves = list(reachable_leaves(root, inside, plain=False))
        tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and can_restore(leaf)]
        self._large = [(path, leaf, leaf._version) for path, leaf in tensors if leaf.numel() > copied]
        self._counts = [(metric._update_count, metric._computed) for metric in self._metrics]
        # Attributes in which wrappers and collections keep values beside the states.
        owners = [module for module in modules if module in inside or isinstance(module, MetricCollection)]
        self._attributes = [(module, _plain_attributes(module)) for module in owners]

    def restore(self, why: str = "is rolled back") -> None:
        """Restore the state; ``StepError`` if a tensor was written that is too large to be copied before each step."""
        for path, tensor, version in self._large:
            if tensor._version != version:
                raise StepError(
                    f"training_step {why}, and cannot be run again: it has written {path}, whose {tensor.numel():,}"
                    f" elements are more than the {MAX_COPIED:,} that are copied before a step; register it as a"
                    " buffer",
                    entry="rollback",
                )
        if any(tensor._version != version for tensor, version in self._unwritten):
            raise StepError(
                f"training_step {why}, and cannot be run again: it has written into its batch for the first time;"
                " write into a copy",
                entry="rollback",
            )
        self._modules.restore()
        with torch.no_grad():
            for written, values in (*self._written, *self._batch):
                written.copy_(values)
        for module, attributes in self._attributes:
            vars(module).update(attributes)
        for metric, states, (count, computed) in zip(self._metrics, self._states, self._counts, strict=True):
            for name, state in states.items():
                setattr(metric, name, _copied(state))  # it may be restored again
            metric._update_count, metric._computed, metric._forward_cache = count, computed, None


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, tensors and plain containers of a metric that it binds anew, but for its states."""
    own = {name: value for name, value in vars(module).items() if name not in getattr(module, "_defaults", ())}
    return {name: value for name, value in own.items() if type(value) in (Tensor, bool, int, float)}


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


class StageModuleStates:
    """Switches the state of the modules between stages; does nothing where a rank has only one."""

    def __init__(
        self, root: nn.Module, stages: Collection[int], num_forwards: int, buffers: Sequence[tuple[dict[str, Any], str]]
    ) -> None:
        """Snapshot the modules before a step of so many forwards, of all ``stages`` of this rank.

        ``buffers`` are those that every stage writes (``num_batches_tracked += 1``): the dict of each, and its key.
        """
        self._root = root
        self._last = max(stages)
        self._forwards_left = num_forwards
        self._buffers = buffers
        self._contents: dict[int, TensorSnapshot] = {}  # by id of a buffer: its last copy
        self._states: dict[int, tuple[ModuleSnapshot, list[tuple[Any, TensorSnapshot | None]]]] = {}
        self._start = self._now() if len(stages) > 1 else None

    def enter(self, stage: int) -> None:
        """Restore the module state that the last run of this stage left."""
        if self._start is not None:
            self._restore(*self._states.get(stage, self._start))

    def leave(self, stage: int) -> None:
        """Save the module state of a stage; after the last forward, the state of the last stage stays."""
        if self._start is None:
            return
        self._forwards_left -= 1
        self._states[stage] = self._now()
        if not self._forwards_left and stage != self._last:
            self._restore(*self._states[self._last])

    def _now(self) -> tuple[ModuleSnapshot, list[tuple[Any, TensorSnapshot | None]]]:
        buffers = [members.get(name) for members, name in self._buffers]
        state = ModuleSnapshot(self._root, buffers=False)
        return state, [(buffer, self._content(buffer)) for buffer in buffers]

    def _content(self, buffer: Any) -> TensorSnapshot | None:
        if not isinstance(buffer, Tensor) or is_absent(buffer):
            return None
        content = self._contents.get(id(buffer))
        if content is None or not content.is_here():
            self._contents[id(buffer)] = content = TensorSnapshot(buffer)
        return content

    def _restore(self, state: ModuleSnapshot, buffers: list[tuple[Any, TensorSnapshot | None]]) -> None:
        state.restore()
        for (members, name), (buffer, content) in zip(self._buffers, buffers, strict=True):
            members[name] = buffer
            if content is not None:
                content.restore()
                self._contents[id(buffer)] = content
