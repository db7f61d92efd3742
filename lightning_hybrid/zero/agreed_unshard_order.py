"""Gather layers in an order on which all ranks of a shard agree, whatever layers the code of each rank calls.

Experts behind ``if mask.any()``, layers that fall out by chance and heads for some batches are called by some ranks
only, or in another order on each. So before a rank gathers it says what it needs, and takes part in what the others
need: they meet in *rounds*. A round is one short row of numbers per rank, then the gathers that any of them asked for,
in the order of the layers. A rank whose backward is over goes on to take part until that of every rank is.

Reductions of gradients go through another group: they are launched between rounds, in an order of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.shared_memory.rows import begin_to_gather
from lightning_hybrid.zero.parameter_group import ParameterGroup
from lightning_hybrid.zero.shard_layout import ShardRanks

_NONE = -1.0
_DONE = -2.0
# Groups that one layer has, and those sent ahead with them: of one per dtype.
_SLOTS = 8


class RanksDiffer(RuntimeError):
    """Ranks that share out parameters are about to train different ones."""


class Rounds:
    """Those of one rank, among the ranks of its shard."""

    def __init__(
        self, groups: Sequence[ParameterGroup], headers: dist.ProcessGroup, gathers: dist.ProcessGroup
    ) -> None:
        """Prepare.

        Args:
            groups: All of this rank, in an order that all ranks of the shard have.
            headers: The ranks of the shard, for rows in host memory.
            gathers: The same ranks, for parameters; no other collectives go through these two.
        """
        self._groups, self._headers = list(groups), headers
        self._unneeded: list[tuple[dist.Work, torch.Tensor]] = []
        self._places = {id(group): float(place) for place, group in enumerate(self._groups)}
        for group in self._groups:
            group.gathers_over = gathers

    @classmethod
    def over(cls, mesh: Mesh, groups: Sequence[ParameterGroup]) -> Rounds:
        """Those of the ranks that share parameters out; collective over the world.

        Args:
            mesh: The ranks.
            groups: As for ``Rounds``.
        """
        headers = mesh.further_group("dp_shard", "headers of gathers", "gloo")
        return cls(groups, headers, mesh.further_group("dp_shard", "gathers"))

    def need(self, wanted: Sequence[ParameterGroup], ahead: Sequence[ParameterGroup]) -> None:
        """Have groups gathered, with those that the others need.

        Args:
            wanted: Of a layer that runs next.
            ahead: Of the one after it; on their way afterwards if it comes next on all ranks.
        """
        missing = [group for group in wanted if not group.is_on_its_way]
        for start in range(0, len(missing), _SLOTS):
            self._meet(self._row(missing[start : start + _SLOTS], ahead))
        for group in wanted:
            group.gather()

    def end(self) -> None:
        """This rank needs nothing more for now: take part until none does."""
        done = [_DONE] + [_NONE] * (2 * _SLOTS - 1)
        while not self._meet(done):
            pass
        for work, _ in self._unneeded:
            work.wait()
        self._unneeded.clear()

    def _row(self, wanted: Sequence[ParameterGroup], ahead: Sequence[ParameterGroup]) -> list[float]:
        halves = []
        for groups in (wanted, ahead):
            places = [self._places[id(group)] for group in groups if not group.is_on_its_way][:_SLOTS]
            halves += places + [_NONE] * (_SLOTS - len(places))
        return halves

    def _meet(self, row: list[float]) -> bool:
        """One round; whether all ranks are done."""
        self._unneeded[:] = [pair for pair in self._unneeded if not pair[0].is_completed()]
        rows = [each.tolist() for each in begin_to_gather(torch.tensor(row, dtype=torch.float64), self._headers)()]
        if all(each[0] == _DONE for each in rows):
            return True
        needed = {int(place) for each in rows for place in each[:_SLOTS] if place >= 0}
        alike = all(each[_SLOTS:] == row[_SLOTS:] for each in rows)
        sent_ahead = {int(place) for place in row[_SLOTS:] if place >= 0} if alike else set()
        for place in (*sorted(needed), *sorted(sent_ahead - needed)):
            self._groups[place].take_part(self._unneeded, is_needed=float(place) in row)
        return False


def agree_on_step(trained: Mapping[str, bool], ranks: ShardRanks, device: torch.device, num_microbatches: int) -> bool:
    """See that all ranks train the same parameters; what they send depends on it. Collective over ``ranks``.

    Args:
        trained: Whether each parameter of this rank takes gradients, by FQN.
        ranks: Of the shard, and those that replicate it.
        device: Of this rank.
        num_microbatches: Of the step on this rank.

    Returns:
        Whether all have as many microbatches.

    Raises:
        RanksDiffer: They train other parameters; on every rank.
    """
    digest = zlib.crc32(bytes(trained.values()))
    votes = torch.tensor([digest, -digest, num_microbatches, -num_microbatches], dtype=torch.int64, device=device)
    for those in (ranks.shard, ranks.replicate):
        if those.size() > 1:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=those)
    highest, lowest, most, fewest = votes.tolist()
    if highest != -lowest:
        frozen = [name for name, takes in trained.items() if not takes]
        raise RanksDiffer(
            f"replicas train different parameters: here {len(frozen)} of {len(trained)} are frozen"
            f" ({', '.join(frozen[:3]) or 'none'}), elsewhere others; freeze the same ones on every rank, or set"
            " zero_stage=0"
        )
    return bool(most == -fewest)
