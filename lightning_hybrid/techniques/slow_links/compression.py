"""GradientCompression in a run: which messages are compressed, and its feedback in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.callbacks.slow_links import Gather, GradientCompression
from lightning_hybrid.slow_links.average import CompressedAverage
from lightning_hybrid.slow_links.power_sgd import PowerSGD
from lightning_hybrid.step.standins.tensors import full_shape, is_absent
from lightning_hybrid.techniques.slow_links.states import (
    ParameterStates,
    local_states,
    save_states,
)


def connect_gradient_compression(callback: GradientCompression, run: Any, reducers: Any) -> CompressedAverage:
    """Average gradients over replicas in compressed form, and keep the state of that in checkpoints."""
    setting, trainer = run.setting, run.setting.trainer
    method = callback.make_method()
    group, over_shards = run.mesh.group("data"), False
    if run.gathered_shardings:
        over_shards = run.mesh.size("dp_replicate") == 1
        group = run.mesh.group("dp_shard" if over_shards else "dp_replicate")
    precision = setting.precision

    def loss_scale() -> float:
        scaler = getattr(precision, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    average = CompressedAverage(
        method,
        group,
        is_compressing=lambda: trainer.global_step >= callback.start_step,
        loss_scale=loss_scale,
        uncompressed=_copies_beside_other_parameters(run) if method.mixes_parameters else (),
        full_shapes={name: full_shape(p) for name, p in setting.module.named_parameters()},
        step=None if getattr(precision, "scaler", None) is None else lambda: trainer.global_step,
    )
    for each in (*reducers.every, *run.active.groups):
        each.compress(average)
    callback.connect(CompressionState(run, average, over_shards=over_shards))
    return average


def _copies_beside_other_parameters(run: Any) -> set[str]:
    """FQNs of parameters that several ranks of a replica copy, and that have other parameters beside them there."""
    copies: set[str] = set()
    if run.plan is not None and run.plan.is_partitioned:
        names = (name for name, _ in run.setting.module.named_parameters())
        copies |= {name for name in names if len(run.plan.ranks_of(name)) > 1}
    if run.setting.layout.tensor_parallel_size > 1 and run.parts:
        sharded = run.names_over("tp")
        copies |= {name for name, _ in run.setting.module.named_parameters() if name not in sharded}
        copies |= {
            name
            for axis in run.parts.shardings
            for name, placement in axis.placements.items()
            if axis.axis == "tp" and placement.is_repeated(axis.group.size())
        }
    return copies


class CompressionState:
    """Feedback and factors of a run, in the form that checkpoints have.

    A checkpoint has the sum of the feedback of all replicas. A run that goes on begins with an equal share of it on
    each: the sum is what matters, since each rank adds its own to what it sends.
    """

    def __init__(self, run: Any, average: CompressedAverage, *, over_shards: bool) -> None:
        """Take the average of a run; ``over_shards`` tells that its ranks have different shards of gradients."""
        self._run, self._average, self._over_shards = run, average, over_shards
        # After a fit the module is full again, and feedback is not.
        named = run.setting.module.named_parameters()
        self._matrices = {name: p for name, p in named if p.is_floating_point() and len(full_shape(p)) > 1}
        self._shapes = {name: p.shape for name, p in self._matrices.items() if not is_absent(p)}

    @torch.no_grad()
    def save(self, gather: Gather | None = None) -> dict[str, Any]:
        """Return the state as a checkpoint has it, or by another ``gather``; collective."""
        with torch._C.DisableTorchFunction():
            self._average.settle()
            has_feedback = self._run.setting.world.decide(bool(self._average.errors), all_ranks=False)
            if not has_feedback:
                return {"feedback": {}, "factors": self._factors()}
            states = {name: {"feedback": self._sum(name)} for name in self._shapes}
            setting = self._run.setting
            optimizer = ParameterStates(self._matrices, states)
            saved = save_states(
                optimizer, setting.module, self._matrices, gather or setting.trainer.strategy.optimizer_state
            )
            return {"feedback": {name: entry["feedback"] for name, entry in saved.items()}, "factors": self._factors()}

    def _sum(self, name: str) -> Tensor:
        """The sum of the feedback of the ranks of a parameter, of the shape of the local shard."""
        group, shape = self._average.group, self._shapes[name]
        error = self._average.errors.get(name)
        if error is None:  # on all of them: it is sent as it is
            return torch.zeros(shape, dtype=self._matrices[name].dtype, device=self._run.setting.device)
        total = error.detach().clone()
        dist.all_reduce(total, group=group)
        if self._over_shards:
            total = total[group.rank()][: shape.numel()]
        return total.reshape(shape)

    def _factors(self) -> dict[str, Tensor]:
        """Factors of all stages, without factors of tensor ranks' shards, which have no place in another layout."""
        method = self._average.method
        if not isinstance(method, PowerSGD):
            return {}
        sharded = self._run.names_over("tp")
        factors = {name: factor.cpu() for name, factor in method.factors.items() if name not in sharded}
        if not self._run.is_pipelined:
            return factors
        rows: list[Any] = [None] * self._run.mesh.size("pp")
        dist.all_gather_object(rows, factors, group=self._run.mesh.group("pp"))
        return dict(sorted((item for row in rows for item in row.items()), key=lambda item: item[0]))

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint of any layout."""
        method, group, errors = self._average.method, self._average.group, self._average.errors
        if isinstance(method, PowerSGD):
            device = self._run.setting.device
            method.factors.update((name, factor.to(device)) for name, factor in state.get("factors", {}).items())
        if not method.has_feedback:
            return
        entries = {name: {"feedback": value} for name, value in state.get("feedback", {}).items()}
        local = local_states(entries, self._run.setting.module, self._run.parts)
        rows = self._rows() if self._over_shards else {}
        for name, entry in local.items():
            feedback = entry["feedback"].to(self._run.setting.device)
            if self._over_shards:
                errors[name] = feedback.new_zeros(group.size(), rows[name])
                errors[name][group.rank()][: feedback.numel()] = feedback.reshape(-1)
            else:
                errors[name] = feedback / group.size()

    def _rows(self) -> dict[str, int]:
        """Numbers of elements of the largest shard of each parameter."""
        return {name: size for group in self._run.active.groups for name, size in group.messages.row_sizes.items()}
