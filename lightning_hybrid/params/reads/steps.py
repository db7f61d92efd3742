"""Steps that every rank runs unsplit, and loaders: the parameters of other ranks are gathered when they are read.

Every rank runs the same code on the same values, and may differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import StepError
from lightning_hybrid.params.reads.gather import GatherOnRead, OneStage, _FullTensor
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.standins.tensors import full_shape, is_absent
from lightning_hybrid.step.tracing.mode import user_line


class StepReads(GatherOnRead):
    """Gathers the parameters that a step reads; ends with it, or with `end`."""

    reads_ahead = False  # a layer runs between two reads

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        shards: LocalShards,
        stages: OneStage,
        agree_on: Callable[[str], None],
        *,
        room: int,
    ) -> None:
        """Begin a step.

        Shards over replicas are not gathered here. ``agree_on`` is called with what is about to be sent, and raises on
        ranks that read something else; ``room`` are bytes of gathered tensors to keep, the same on every rank.
        """
        super().__init__(parameters, shards.over("tp"), stages, room=room)
        others = (axis for axis in shards.shardings if axis.axis not in ("tp", "cp"))
        self._sharded_over_replicas = {name for axis in others for name in axis.placements}
        self._agree_on = agree_on

    def __exit__(self, *exception: Any) -> None:
        """Free gathered tensors."""
        failed = bool(exception) and exception[0] is not None
        if failed:
            self._full_tensors = {}
        super().__exit__(*exception)

    def end(self, *, failed: bool) -> None:
        """Free gathered tensors, unless the step has failed with what it has written into them written back."""
        if failed:
            self._full_tensors = {}
        self.forget()

    def forget(self) -> None:
        """Free gathered tensors; the gradients of full parameters stay."""
        for held in self._full_tensors.values():
            gradient, parameter = held.full.grad, held.tensor
            if gradient is not None and not is_absent(parameter) and gradient.shape == parameter.shape:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        super().forget()

    def _hold(self, tensors: Mapping[int, tuple[str, Tensor]]) -> dict[int, _FullTensor]:
        found = super()._hold(tensors)
        for held in found.values() if torch.is_grad_enabled() else ():
            if held.tensor.requires_grad and not held.full.requires_grad:
                held.full.requires_grad_()
                held.keep()  # gradients need one tensor for all its uses
        return found

    def _agree(self, what: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._agree_on(what)

    def _gradient(self, access: str, func: Any, args: Any) -> Any:
        held = self._full_tensors.get(id(args[0]))
        return func(*args) if held is None else func(held.full, *args[1:])

    def _refuse(self, operation: str, tensor: Tensor) -> None:
        raise StepError(
            f"{user_line()}: {operation} reads a tensor without content on this rank, such as one that a hook or"
            " torch.func made of parameters of other ranks, in a step of evaluation that every rank runs unsplit; keep"
            " a copy of the module, or a number, in the hook",
            entry="eval-content",
        )

    def _joined(self, name: str, local: Tensor) -> Tensor:
        full, shape = super()._joined(name, local), full_shape(self._parameters[name])
        if tuple(full.shape) != shape:
            raise StepError(
                f"{name!r} is sharded over replicas: this rank has shape {tuple(full.shape)} of {shape}, in a step of"
                " evaluation that every rank runs unsplit; set zero_stage=0 and expert_parallel_size=1",
                entry="eval-shard",
            )
        return full

    def _write(self, name: str, full: Tensor, tensor: Tensor) -> None:
        if name in self._sharded_over_replicas:
            raise StepError(
                f"the step writes into {name!r}, which is sharded over replicas, in a step of evaluation that every"
                " rank runs unsplit; write it in a hook such as on_validation_epoch_start, or set zero_stage=0",
                entry="eval-write",
            )
        super()._write(name, full, tensor)
