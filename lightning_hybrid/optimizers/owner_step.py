"""Optimizer step on full parameters, each at one owner of the ranks that hold its shards.

Some steps need all elements of a parameter at once, and nothing of other parameters: Muon orthogonalises a matrix,
Adafactor takes means over rows and columns. Round by round, with one or a few parameters for each owner:

    gather    each rank sends its shards of parameters and gradients to their owners
    step      each owner steps its full parameters; it alone has their states, in full
    scatter   each owner sends every rank its shard of the new values

A round is as large as the largest parameter, so no rank ever has all full parameters that it owns, and none has those
of others. It takes two all-to-alls along each axis that shards its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.collectives.tensors import TensorSpec, exchange_tensors
from lightning_hybrid.optimizers.replacement import Place, step_after_closure, step_hooks_once
from lightning_hybrid.params import store
from lightning_hybrid.params.owners import axes_of
from lightning_hybrid.params.placement import Shard, join, shard_tensor
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.step.standins.tensors import is_absent

_FLAG = TensorSpec((1,), torch.uint8)
_Gathered = tuple[Tensor, Tensor, Tensor]  # a parameter's value, its gradient, and whether it has one, of shape (1,)


class OwnerStep:
    """The steps of one optimizer that needs full parameters, one at a time."""

    def __init__(self, optimizer: Optimizer, parts: LocalShards, names: Mapping[int, str], state: Any) -> None:
        """Replace the optimizer's step; collective if it has states already.

        Parameters may be added to it later. Where ``state`` of the module says that they are full, the optimizer's own
        step runs.
        """
        self.optimizer, self._parts, self._state = optimizer, parts, state
        self._names = names
        self._parameters: dict[str, Tensor] = {}
        self._rounds: list[list[str]] = []
        self._add_parameters()
        self._original = optimizer.step
        self._undo = step_after_closure(optimizer, self._step, Place.FULL, reason="steps full parameters at owners")

    def close(self) -> None:
        """Restore the optimizer's own step; its states stay at the owners."""
        self._undo()

    # -- owners and rounds ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _add_parameters(self) -> None:
        """Assign owners to the optimizer's parameters, also to ones that were added to it since.

        Owners alone keep states that were made when the optimizer was built.
        """
        members = [p for group in self.optimizer.param_groups for p in group["params"] if not is_absent(p)]
        sharded, states = self._parts.names - self._parameters.keys(), self.optimizer.state
        added = {self._names[id(p)]: p for p in members if self._names.get(id(p)) in sharded}
        if not added:
            return
        for p in added.values():
            for key, value in dict(states.get(p, {})).items():
                if isinstance(value, Tensor):
                    states[p][key] = self._parts.full_state_of(p, value)
        self._parts.owners.add(added, {name: self._parts.full_shape(name, p).numel() for name, p in added.items()})
        for p in added.values():
            if not self._parts.owners.has_states_of(p):
                states.pop(p, None)
        self._parameters |= added
        self._rounds = self._plan_rounds()

    def _plan_rounds(self) -> list[list[str]]:
        """Lists of names; in each, every owner has parameters of at most the bytes of the largest one."""
        nbytes = {n: self._parts.full_shape(n, p).numel() * p.element_size() for n, p in self._parameters.items()}
        rounds: list[list[str]] = []
        by_axes: dict[tuple[int, ...], list[str]] = {}
        for name in self._parameters:
            by_axes.setdefault(axes_of(name, self._parts.shardings), []).append(name)
        for names in by_axes.values():
            limit = max(nbytes[name] for name in names)
            filled: dict[tuple[int, ...], list[int]] = {}  # by owner, its bytes in each round
            of_axes: list[list[str]] = []
            for name in sorted(names, key=lambda name: -nbytes[name]):  # the first round with room for it
                own = filled.setdefault(tuple(self._parts.owners.of(name).values()), [])
                number = next((n for n, size in enumerate(own) if size + nbytes[name] <= limit), len(own))
                own += [0] if number == len(own) else []
                own[number] += nbytes[name]
                of_axes += [[] for _ in range(number + 1 - len(of_axes))]
                of_axes[number].append(name)
            rounds += of_axes
        return rounds

    # -- the step ------------------------------------------------------------------------------------------------------

    def _step(self, kwargs: dict[str, Any]) -> None:
        optimizer = self.optimizer
        if self._state.is_full:
            self._original(**kwargs)
            return
        self._add_parameters()
        everything = [dict(group) for group in optimizer.param_groups]
        members = {id(p) for group in everything for p in group["params"]}
        others = members - {id(p) for p in self._parameters.values()}
        with step_hooks_once(optimizer):
            try:
                self._step_only(everything, others, kwargs)
                for names in self._rounds:
                    self._step_round(names, everything, kwargs)
            finally:
                for group, before in zip(optimizer.param_groups, everything, strict=True):
                    group["params"] = before["params"]

    def _step_only(self, everything: Sequence[dict[str, Any]], ids: Collection[int], kwargs: dict[str, Any]) -> None:
        """Step the parameters with these ids; each call finds the options of groups, such as counts, as before."""
        for group, before in zip(self.optimizer.param_groups, everything, strict=True):
            group.clear()
            group.update({**before, "params": [p for p in before["params"] if id(p) in ids]})
        self._original(**kwargs)

    @torch.no_grad()
    def _step_round(self, names: Sequence[str], everything: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> None:
        found = self._gather(names)
        names_here = {id(p): name for name, p in self._parameters.items() if name in found}
        full: dict[str, Tensor] = {}
        own = [(self._parameters[name], value, gradient) for name, (value, gradient) in found.items()]
        held = ((p, value.to(p.device), None if g is None else g.to(p.device)) for p, value, g in own)
        with store.swapped(held, lambda p, _: full.update({names_here[id(p)]: p.data})):
            found.clear()
            own.clear()
            if names_here:
                with torch.enable_grad():
                    self._step_only(everything, names_here, kwargs)
        for name, local in self._scatter(names, full).items():
            self._parameters[name].data.copy_(local)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _gather(self, names: Sequence[str]) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Full values and gradients of the parameters that this rank owns; None without a gradient on any rank."""
        tensors: dict[str, _Gathered] = {}
        for name in names:
            p = self._parameters[name]
            if p.requires_grad or p.grad is not None:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad.detach()
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                flag = torch.full((1,), p.grad is not None, dtype=torch.uint8, device=p.device)
                tensors[name] = p.detach(), gradient, flag
        for number, axis in reversed(list(enumerate(self._parts.shardings))):
            local = [name for name in tensors if name in axis.placements]
            if local:
                tensors |= self._gather_along(axis, number, {name: tensors.pop(name) for name in local})
        return {name: (value, gradient if bool(flag) else None) for name, (value, gradient, flag) in tensors.items()}

    def _gather_along(self, axis: AxisSharding, number: int, tensors: dict[str, _Gathered]) -> dict[str, _Gathered]:
        """Gather each parameter's tensors at its owner along one axis; returns this rank's own parameters."""
        size, rank = axis.group.size(), axis.group.rank()
        owner = {name: self._parts.owners.of(name)[number] for name in tensors}
        own = [name for name in tensors if owner[name] == rank]
        sent = [[t for n, each in tensors.items() if owner[n] == other for t in each] for other in range(size)]
        arriving = [
            [spec for n in own for spec in (*_specs_of(tensors[n][:2], axis.placements[n], other, size), _FLAG)]
            for other in range(size)
        ]
        tensors.clear()
        received = exchange_tensors(sent, arriving, axis.group)
        found: dict[str, _Gathered] = {}
        for place, name in enumerate(own):
            values, gradients, flags = ([row[3 * place + k] for row in received] for k in range(3))
            placement = axis.placements[name]
            found[name] = join(values, placement), join(gradients, placement), torch.stack(flags).amax(0)
        return found

    def _scatter(self, names: Sequence[str], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New local shards of parameters; owners pass the full values."""
        tensors = {name: value.detach() for name, value in full.items()}
        exchanged = [n for n in names if self._parameters[n].requires_grad or self._parameters[n].grad is not None]
        shardings = self._parts.shardings
        for number, axis in enumerate(shardings):
            size, rank = axis.group.size(), axis.group.rank()
            # Of those that this rank is about to hold a shard of: it is at the owner's place along all further axes.
            local = [n for n in exchanged if number in self._parts.owners.of(n) and self._is_owner_after(n, number)]
            if not local:
                continue
            owner = {name: self._parts.owners.of(name)[number] for name in local}
            own = [name for name in local if owner[name] == rank]
            sent = [[_shard(tensors[n], axis.placements[n], other, size) for n in own] for other in range(size)]
            arriving = [[self._spec_after(n, number) for n in local if owner[n] == other] for other in range(size)]
            received = exchange_tensors(sent, arriving, axis.group)
            for name in own:
                tensors.pop(name)
            for other, row in enumerate(received):
                tensors.update(zip((n for n in local if owner[n] == other), row, strict=True))
        return tensors

    def _is_owner_after(self, name: str, number: int) -> bool:
        """Whether this rank is at the owner's place along the axes that shard a parameter further than one axis."""
        further = {n: rank for n, rank in self._parts.owners.of(name).items() if n > number}
        return all(self._parts.shardings[n].group.rank() == rank for n, rank in further.items())

    def _spec_after(self, name: str, number: int) -> TensorSpec:
        """Shape and dtype of a parameter's shard on this rank after the axes up to one have sharded it."""
        p = self._parameters[name]
        shape = list(self._parts.full_shape(name, p))
        for axis in self._parts.shardings[: number + 1]:
            if name in axis.placements:
                shape[axis.placements[name].dim] = axis.local_length(axis.placements[name])
        return TensorSpec(tuple(shape), p.dtype)


def _shard(full: Tensor, placement: Shard, rank: int, size: int) -> Tensor:
    """A rank's shard, as a view where it is one."""
    return placement.view(full, rank, size) if len(placement.pieces) == 1 else shard_tensor(full, placement, rank, size)


def _specs_of(tensors: Sequence[Tensor], placement: Shard, rank: int, size: int) -> list[TensorSpec]:
    """Shapes and dtypes of another rank's shards of tensors, from this rank's shards ``tensors``."""
    length = sum(length for _, length in placement.ranges(rank, size))
    specs = []
    for tensor in tensors:
        shape = list(tensor.shape)
        shape[placement.dim] = length
        specs.append(TensorSpec(tuple(shape), tensor.dtype))
    return specs
