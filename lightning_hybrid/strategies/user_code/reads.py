"""Reads of full parameters and gradients in hooks of the user, and in optimizer steps that need them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer
from lightning_hybrid.optimizers.trial import can_step_shards, combines_parameters
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.shards import ShardedParameterReads
from lightning_hybrid.params.reads.stages import CrossStageReads
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import replace
from lightning_hybrid.step.standins.absent_tensors import is_absent

# Replicas over which parameters are sharded may have different numbers of these.
_PER_EVALUATED_BATCH = tuple(
    f"on_{stage}_batch_{when}" for stage in ("validation", "test", "predict") for when in ("start", "end")
)


class HookReads:
    """Reads in user hooks: of parameters in all stages, and of full parameters where ranks hold shards.

    Args:
        stages: Reads across stages, if there are several.
        parts: Local shards, if parameters are sharded.
        parameters: Of the module, by FQN.
        agreement: By which the ranks that hold shards find out that they do not read the same.
        over_replicas: Whether replicas hold shards of one copy.
    """

    def __init__(
        self,
        stages: CrossStageReads | None,
        parts: LocalShards | None,
        parameters: Mapping[str, nn.Parameter],
        agreement: HookAgreement,
        *,
        over_replicas: bool = False,
    ) -> None:
        self._over_replicas = over_replicas
        self._stages = stages
        self._agreement = agreement
        self._shards = None
        if parts is not None:
            note = None if stages is None else stages.record_full_tensor
            self._shards = ShardedParameterReads(parts, parameters, note, self._meet)
        self._depth = 0
        self._hook = ""

    def _meet(self, name: str) -> None:
        self._agreement.agree_on(self._hook, f"reads {name}")

    def of_optimizers(self, optimizers: Iterable[Optimizer]) -> dict[Optimizer, HookReads]:
        """Return the reads around each optimizer's step, without those that step shards as they would full tensors."""
        found = {optimizer: self._of_optimizer(optimizer) for optimizer in optimizers}
        return {optimizer: reads for optimizer, reads in found.items() if reads is not None}

    def _of_optimizer(self, optimizer: Optimizer) -> HookReads | None:
        if combines_parameters(optimizer):
            return self
        # SparseAdam takes no dense gradients, with which the other question is asked, and one number at a time.
        if (
            self._shards is None
            or isinstance(optimizer, torch.optim.SparseAdam | TrustRatioOptimizer)
            or can_step_shards(optimizer)
        ):
            return None
        alone = copy.copy(self)  # torch's own look at one parameter at a time, whatever its stage
        alone._stages = None
        return alone

    @contextlib.contextmanager
    def hook(self, name: str, *, is_complete: bool = True, is_on_all_ranks: bool = True) -> Iterator[None]:
        """Wrap a hook, as ``CrossStageReads.hook``."""
        outer = self._depth == 0
        self._depth += 1
        if outer:
            self._hook = name
        try:
            with contextlib.ExitStack() as stack:
                if self._stages is not None:
                    how = {"is_complete": is_complete, "is_on_all_ranks": is_on_all_ranks}
                    stack.enter_context(self._stages.hook(name, **how))
                if self._shards is not None and outer:
                    if not (self._over_replicas and name.endswith(_PER_EVALUATED_BATCH)):
                        stack.enter_context(self._agreement.checked_hook(name, is_on_all_ranks=is_on_all_ranks))
                    stack.enter_context(self._shards)
                yield
        finally:
            self._depth -= 1

    def known(self, value: Any) -> Any:
        """Return a value with contents, as ``CrossStageReads.known``."""
        return value if self._stages is None else self._stages.known(value)

    @contextlib.contextmanager
    def tracking(self, states: Sequence[Mapping[Any, Any]], copies: Sequence[nn.Module]) -> Iterator[None]:
        """Track full states of optimizers (by parameter), and full copies of the module, which are sharded as it is."""
        if self._stages is not None:
            for state in states:
                self._stages.track_state(state)
            for other in copies:
                self._stages.track_copy(other)
        with contextlib.nullcontext() if self._shards is None else self._shards.tracking(states, copies):
            yield

    def is_on_all_ranks(self, tensor: Tensor) -> bool | None:
        """Whether all ranks have a tensor in its full shape; None if it is not here, and its location not recorded."""
        if self._shards is not None and (known := self._shards.is_shard(tensor)) is not False:
            return None if known is None else False
        return not is_absent(tensor) if self._stages is None else self._stages.is_on_all_ranks(tensor)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather an object from each rank that has a shard of this copy of the module; collective."""
        local = self._agreement.gather_objects(mine)
        return local if self._stages is None else [each for row in self._stages.gather_objects(local) for each in row]

    def contents_for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """Return contents in full shapes, as ``CrossStageReads.contents_for_file``."""
        full_tensors = [tensor if self._shards is None else self._shards.full_tensor(tensor) for tensor in tensors]
        return full_tensors if self._stages is None else self._stages.contents_for_file(full_tensors, keep=keep)

    def track_state(self, state: Mapping[Any, Any]) -> None:
        """Track the state of a parameter, as ``CrossStageReads.track_state``."""
        if self._shards is not None:
            self._shards.unshard_state(state)
        if self._stages is not None:
            self._stages.track_state(state)


def summarize_full_parameters(callback: Any, reads: HookReads) -> Callable[[], None]:
    """Let Lightning's model summary count full parameters; return the undo."""
    original = callback.on_fit_start

    def on_fit_start(*args: Any, **kwargs: Any) -> None:
        with reads.hook("ModelSummary.on_fit_start"):
            original(*args, **kwargs)

    return replace(callback, "on_fit_start", on_fit_start, reason="reads full parameters")
