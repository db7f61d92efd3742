"""States that a run carries across changes of its layout, and the fallback to shards of ZeRO-3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_hybrid.errors import WITHOUT_STAGES, LayoutError, is_name_of_error
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.step.objects.tensors import gradient_dtype
from lightning_hybrid.step.standins.tensors import is_absent


class FullGradients:
    """Accumulated gradients of all parameters, in full on every rank; gathered by a collective over the world.

    ``plan``, ``parts`` and ``mesh`` are of the layout that ends; ``are_complete`` says whether gradients are summed
    over stages and averaged over ``replicas``, an axis of the mesh.
    """

    @torch.no_grad()
    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        parts: LocalShards,
        mesh: Mesh,
        device: torch.device,
        *,
        are_complete: bool,
        replicas: str = "data",
    ) -> None:
        self._are_complete, self._device, self._replicas = are_complete, device, replicas
        self._full: dict[str, Tensor] = {}
        named = dict(module.named_parameters())
        local_names = {
            name for name, parameter in named.items() if not is_absent(parameter) and parameter.grad is not None
        }
        rows: list[Any] = [None] * mesh.layout.world_size
        dist.all_gather_object(rows, local_names)
        present = set().union(*rows)
        for name, parameter in named.items():
            if name in present:
                self._full[name] = self._gathered(name, parameter, plan, parts, mesh)

    def _gathered(self, name: str, parameter: nn.Parameter, plan: StagePlan, parts: LocalShards, mesh: Mesh) -> Tensor:
        holders = plan.ranks_of(name)
        full, dtype = None, torch.promote_types(parameter.dtype, torch.float32)
        if plan.rank in holders:
            gradient = parameter.grad
            full = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient.detach().to(dtype)
            full = full.to_dense() if full.is_sparse else full
            full = parts.unshard(name, full)
            if self._are_complete and plan.rank != holders[0]:
                full = torch.zeros_like(full)
        shape = parameter.shape if full is None else full.shape
        total = torch.zeros(shape, dtype=dtype, device=self._device) if full is None else full.to(self._device).clone()
        mesh.all_reduce(total, "pp")
        if not self._are_complete:
            mesh.all_reduce(total, self._replicas, op="mean")
        return total

    @torch.no_grad()
    def give(self, module: nn.Module, plan: StagePlan | None, parts: LocalShards) -> None:
        """Assign each parameter its shard of the gradients, under the new layout."""
        for name, parameter in module.named_parameters():
            full = self._full.get(name)
            if full is None or is_absent(parameter):
                continue
            if not self._are_complete and plan is not None and plan.ranks_of(name)[0] != plan.rank:
                continue  # the sum over the pipeline ranks that hold it is still to come
            local = parts.shard_of(name, parameter, full)
            parameter.grad = local.to(parameter.device, gradient_dtype(parameter), copy=True)


_SIZES = {"pp": "pipeline_parallel_size", "cp": "context_parallel_size", "tp": "tensor_parallel_size"}
# The last alternative of a message: to have no stages. These ranks hold shards already.
_NO_STAGES = re.compile(rf"(?:[;,]? or|;|\. To [^.,]+,) {re.escape(WITHOUT_STAGES)}")


class Fallback:
    """The reason, equal on all ranks, why those along some axes hold ZeRO-3 shards and run the step unpartitioned.

    Attributes:
        mesh: The ranks, with shards over these axes.
        reason: Why; a type of error, and its message.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: Mesh,
        axes: Sequence[str],
        reason: str,
        *,
        strict: bool,
        may_retry: bool = False,  # whether a batch may change that: a warning tells the reason only after the last try
    ) -> None:
        self._module, self._strict, self.reason = module, strict, _NO_STAGES.sub("", reason)
        self._may_retry = may_retry
        sizes = {axis: mesh.size(axis) for axis in axes if mesh.size(axis) > 1}
        self._sizes = ", ".join(f"{_SIZES[axis]}={size}" for axis, size in sizes.items())
        self._place = "pipelined" if list(axes) == ["pp"] else "cut"
        self.mesh = mesh.with_shards_over(list(sizes))
        self._untold = False

    @property
    def _is_of_the_step(self) -> bool:
        """Whether the reason is an error that the user's own code may raise without stages too."""
        kind, colon, _ = self.reason.partition(":")
        return bool(colon) and kind.isidentifier() and kind[0].isupper() and not is_name_of_error(kind)

    @property
    def refusal(self) -> str:
        """The sizes that the step cannot be run under, and the reason."""
        return f"the step cannot be run under {self._sizes}: {self.reason}"

    @property
    def line(self) -> str:
        """The line of the start table; "" where a warning says the same: before it, or once the step has run."""
        is_told = self._may_retry and not self._is_of_the_step
        return f"sharded instead of {self._place}: {self.reason}" if is_told else ""

    def announce_once_run(self, error: Exception | None) -> None:
        """Announce; an error of the step only after it has run: a mistake in it ends the run as itself."""
        self._untold = self._is_of_the_step and not self._strict
        if not self._untold:
            self.announce(error)

    def has_run(self) -> None:
        """Announce what was left until the step has run, which it has."""
        if self._untold:
            self.announce()

    def announce(self, error: Exception | None = None, *, reason: str = "") -> None:
        """Warn that ranks hold shards, and why (``reason`` replaces the first), now that no batch can change that.

        Raises:
            LayoutError: The user wants the layout or nothing.
        """
        shown, self.reason = self.line, _NO_STAGES.sub("", reason) or self.reason
        is_in_table = bool(shown) and self.line == shown
        self._untold = False
        why = " (the start table has the reason)" if is_in_table else f": {self.reason}"
        if self._strict:
            name = f"{type(self._module).__name__}.training_step"
            raise LayoutError(
                f"strict_layout=True, and {name} cannot be run under {self._sizes}: {self.reason}; set"
                f" strict_layout=False to have these {self.mesh.size('shares')} ranks hold shards of every parameter,"
                " gradient and optimizer state instead",
                entry="strict-layout",
            ) from error
        if not self._module.automatic_optimization:
            # Its optimizers take as many steps as it likes, so that shares would not give the numbers of one process.
            batch = "on the full batch; replicas with zero_stage=3 would divide the time too"
        else:
            batch = "on its share of the batch"
        rank_zero_warn(
            f"sharded instead of {self._place}{why}; each of the {self.mesh.size('shares')} ranks of {self._sizes}"
            f" holds a shard of the model and runs the step {batch}. strict_layout=True makes this an error"
            " (lightning-hybrid explain-error sharded-instead)"
        )
