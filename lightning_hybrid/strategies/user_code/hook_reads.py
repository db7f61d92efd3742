"""Reads of full parameters and gradients in hooks of the user."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.full_params.cross_stage_mode import CrossStageReads
from lightning_hybrid.full_params.sharded_parameter_mode import ShardedParameterReads
from lightning_hybrid.full_params.value_locations import ValueLocations
from lightning_hybrid.parts.local_shards import LocalShards
from lightning_hybrid.patching import replace
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.strategies.user_code.user_optimizers import looks_at_all
from lightning_hybrid.zero.optimizer_states.layerwise_step import twin_of

_PER_EVALUATED_BATCH = tuple(
    f"on_{stage}_batch_{when}" for stage in ("validation", "test", "predict") for when in ("start", "end")
)


class HookReads:
    """What hooks of the user read: of all stages, and whole where ranks hold parts."""

    def __init__(
        self,
        stages: CrossStageReads | None,
        parts: LocalShards | None,
        parameters: Mapping[str, nn.Parameter],
        contents: ValueLocations,
        *,
        over_replicas: bool = False,
    ) -> None:
        """Say what is in parts.

        Args:
            stages: If there are several.
            parts: If parameters are cut.
            parameters: Of the module, by FQN.
            contents: By which the ranks that hold parts find out that they do not read the same.
            over_replicas: Whether replicas hold parts of one copy.
        """
        self._over_replicas = over_replicas
        self._stages = stages
        self._contents = contents
        self._cuts = None
        if parts is not None:
            note = None if stages is None else stages.record_full_tensor
            self._cuts = ShardedParameterReads(parts, parameters, note, self._meet)
        self._depth = 0
        self._hook = ""

    def _meet(self, name: str) -> None:
        self._contents.agree_on(self._hook, f"reads {name}")

    def of_optimizers(self, optimizers: Iterable[Optimizer]) -> dict[Optimizer, HookReads]:
        """What the steps of optimizers must run in, but for those that do the same to parts as to the whole."""
        found = {optimizer: self._of_optimizer(optimizer) for optimizer in optimizers}
        return {optimizer: reads for optimizer, reads in found.items() if reads is not None}

    def _of_optimizer(self, optimizer: Optimizer) -> HookReads | None:
        if looks_at_all(optimizer):
            return self
        # SparseAdam takes no dense gradients, with which the other question is asked, and one number at a time.
        if self._cuts is None or isinstance(optimizer, torch.optim.SparseAdam) or steps_on_parts(optimizer):
            return None
        alone = copy.copy(self)  # torch's own look at one parameter at a time, whatever its stage
        alone._stages = None
        return alone

    @contextlib.contextmanager
    def hook(self, name: str, *, is_complete: bool = True) -> Iterator[None]:
        """As ``CrossStageReads.hook``."""
        outer = self._depth == 0
        self._depth += 1
        if outer:
            self._hook = name
        try:
            with contextlib.ExitStack() as stack:
                if self._stages is not None:
                    stack.enter_context(self._stages.hook(name, is_complete=is_complete))
                if self._cuts is not None and outer:
                    if not (self._over_replicas and name.endswith(_PER_EVALUATED_BATCH)):
                        stack.enter_context(self._contents.checked_hook(name))
                    stack.enter_context(self._cuts)
                yield
        finally:
            self._depth -= 1

    def known(self, value: Any) -> Any:
        """As ``CrossStageReads.known``."""
        return value if self._stages is None else self._stages.known(value)

    @contextlib.contextmanager
    def tracking(self, states: Sequence[Mapping[Any, Any]], copies: Sequence[nn.Module]) -> Iterator[None]:
        """What runs inside also reads whole states of optimizers, and whole copies of the module.

        Args:
            states: By parameter.
            copies: In parts as the module is.
        """
        if self._stages is not None:
            for state in states:
                self._stages.track_state(state)
            for other in copies:
                self._stages.track_copy(other)
        with contextlib.nullcontext() if self._cuts is None else self._cuts.tracking(states, copies):
            yield

    def is_on_all_ranks(self, tensor: Tensor) -> bool | None:
        """Whether all ranks have the whole of a tensor; None if it is not here, and nobody knows where it is."""
        if self._cuts is not None and (known := self._cuts.is_shard(tensor)) is not False:
            return None if known is None else False
        return not is_absent(tensor) if self._stages is None else self._stages.is_on_all_ranks(tensor)

    def gather_objects(self, mine: Any) -> list[Any]:
        """What each rank says that has a part of this copy of the module; collective over them."""
        said = self._contents.gather_objects(mine)
        return said if self._stages is None else [each for row in self._stages.gather_objects(said) for each in row]

    def contents_for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """As ``CrossStageReads.contents_for_file``."""
        wholes = [tensor if self._cuts is None else self._cuts.full_tensor(tensor) for tensor in tensors]
        return wholes if self._stages is None else self._stages.contents_for_file(wholes, keep=keep)

    def track_state(self, state: Mapping[Any, Any]) -> None:
        """As ``CrossStageReads.track_state``."""
        if self._cuts is not None:
            self._cuts.unshard_state(state)
        if self._stages is not None:
            self._stages.track_state(state)


def summarize_wholes(callback: Any, reads: HookReads) -> Callable[[], None]:
    """Let Lightning's model summary count whole parameters; returns what undoes it."""
    original = callback.on_fit_start

    def on_fit_start(*args: Any, **kwargs: Any) -> None:
        with reads.hook("ModelSummary.on_fit_start"):
            original(*args, **kwargs)

    return replace(callback, "on_fit_start", on_fit_start, reason="reads full parameters")


def steps_on_parts(optimizer: Optimizer) -> bool:
    """Whether an optimizer does to the parts of a parameter what it does to the whole; tried on a small one."""
    generator = torch.Generator().manual_seed(0)
    full_tensor = torch.rand(4, 6, dtype=torch.float64, generator=generator) + 0.1
    gradients = [torch.rand(4, 6, dtype=torch.float64, generator=generator) - 0.4 for _ in range(2)]
    try:
        expected = _stepped(optimizer, [full_tensor], [[gradient] for gradient in gradients])[0]
        for dim in (0, 1):
            parts = [part.contiguous() for part in full_tensor.chunk(2, dim)]
            given = [[part.contiguous() for part in gradient.chunk(2, dim)] for gradient in gradients]
            if not torch.allclose(torch.cat(_stepped(optimizer, parts, given), dim), expected, rtol=1e-9, atol=1e-12):
                return False
    except Exception:
        return False
    return True


def _stepped(
    optimizer: Optimizer, starts: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin = twin_of(optimizer, parameters)
    for given in gradients:
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(twin)
    return [parameter.detach() for parameter in parameters]
