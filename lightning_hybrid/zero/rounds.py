"""Gathers of layers in an order that all ranks of a shard group agree on, whichever layers the code of each rank calls.

Experts behind ``if mask.any()``, stochastic depth and heads for some batches are called by some ranks only, or in
another order on each. So before a rank gathers it announces its request, and joins the gathers that others request:
they synchronize in *rounds*. A round is one short row of numbers per rank, then the gathers that any rank requested, in
the order of the layers. A rank whose backward is over goes on to join rounds until the backward of every rank is.

Reductions of gradients go through another group: they are launched between rounds, in an order of their own. Each row
also has the number of those that its rank has launched, so that a backward waits for no others.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_hybrid.errors import RanksDiffer
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.shared_memory.transfers import start_all_gather
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.ranks import ShardRanks
from lightning_hybrid.zero.reductions import Reductions

_NONE = -1.0
_DONE = -2.0
# Most groups of one layer, and most to prefetch: a layer has one per dtype.
_SLOTS = 8


class GatherRounds:
    """The rounds of one rank, among the ranks of its shard group."""

    def __init__(self, mesh: Mesh, groups: Sequence[ParameterGroup], reductions: Reductions) -> None:
        """Prepare rounds; collective over the world.

        The order of the groups is the same on all ranks.
        """
        # For rows in host memory, and for parameters; no other collectives go through these.
        self._headers = mesh.dedicated_group("dp_shard", "headers of gathers", "gloo")
        axes = [axis for axis in ("dp_shard", "ep_shard") if axis in mesh.axes]  # experts have fewer replicas
        gathers = {mesh.group(axis): mesh.dedicated_group(axis, "gathers") for axis in axes}
        self._groups, self._reductions = list(groups), reductions
        self._unneeded: list[tuple[dist.Work, torch.Tensor]] = []
        self._positions = {id(group): float(position) for position, group in enumerate(self._groups)}
        for group in self._groups:
            group.gather_through(gathers)

    def request(self, requested: Sequence[ParameterGroup], prefetched: Sequence[ParameterGroup]) -> None:
        """Gather groups, and join the gathers that other ranks request.

        ``prefetched`` are of the layer after the next one, if it comes next on all ranks.
        """
        missing = [group for group in requested if not group.is_full_or_gathering]
        for start in range(0, len(missing), _SLOTS):
            self._run_round(self._row(missing[start : start + _SLOTS], prefetched))
        for group in requested:
            group.gather()

    def finish(self) -> None:
        """Join the rounds of the other ranks until none requests anything more."""
        done = [_DONE] + [_NONE] * (2 * _SLOTS - 1)
        while not self._run_round(done):
            pass
        for work, _ in self._unneeded:
            work.wait()
        self._unneeded.clear()

    def _row(self, requested: Sequence[ParameterGroup], prefetched: Sequence[ParameterGroup]) -> list[float]:
        halves = []
        for groups in (requested, prefetched):
            positions = [self._positions[id(group)] for group in groups if not group.is_full_or_gathering][:_SLOTS]
            halves += positions + [_NONE] * (_SLOTS - len(positions))
        return halves

    @below_read_guards
    def _run_round(self, row: list[float]) -> bool:
        """Run one round; returns whether all ranks are done."""
        self._unneeded[:] = [pair for pair in self._unneeded if not pair[0].is_completed()]
        sent = torch.tensor([*row, self._reductions.num_launched], dtype=torch.float64)
        gathered = [each.tolist() for each in start_all_gather(sent, self._headers)()]
        rows, launched = [each[:-1] for each in gathered], [int(each[-1]) for each in gathered]
        self._reductions.receive(min(launched))
        if all(each[0] == _DONE for each in rows):
            return True
        needed = {int(position) for each in rows for position in each[:_SLOTS] if position >= 0}
        is_same_next = all(each[_SLOTS:] == row[_SLOTS:] for each in rows)
        prefetched_next = {int(position) for position in row[_SLOTS:] if position >= 0} if is_same_next else set()
        for position in (*sorted(needed), *sorted(prefetched_next - needed)):
            self._groups[position].join_gather(self._unneeded, is_needed=float(position) in row)
        return False


def agree_on_step(
    trained: Mapping[str, bool], ranks: ShardRanks, device: torch.device, num_microbatches: int, *, has_hooks: bool
) -> tuple[bool, bool]:
    """Check that all ranks train the same parameters, on which their messages depend. Collective over ``ranks``.

    Returns:
        Whether all ranks have the same number of microbatches, and whether any of them has such hooks.

    Raises:
        RanksDiffer: They train different parameters; raised on every rank.
    """
    digest = zlib.crc32(bytes(trained.values()))
    row = [digest, -digest, num_microbatches, -num_microbatches, int(has_hooks)]
    votes = torch.tensor(row, dtype=torch.int64, device=device)
    for those in (ranks.shard, ranks.replicate):
        if those.size() > 1:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=those)
    highest, lowest, most, fewest, any_hooks = votes.tolist()
    if highest != -lowest:
        frozen = [name for name, takes in trained.items() if not takes]
        raise RanksDiffer(
            f"replicas train different parameters: on this rank {len(frozen)} of {len(trained)} are frozen"
            f" ({', '.join(frozen[:3]) or 'none'}), on another replica others; freeze the same ones on every rank, or"
            " set zero_stage=0",
            entry="frozen-differ",
        )
    return bool(most == -fewest), bool(any_hooks)
