"""Gathers of layers in an order that all ranks of a shard group agree on, whichever layers the code of each rank calls.

Experts behind ``if mask.any()``, stochastic depth and heads for some batches are called by some ranks only, or in
another order on each. So before a rank gathers it announces its request, and joins the gathers that others request:
they synchronize in *rounds*. A round is one short row of numbers per rank, then the gathers that any rank requested, in
the order of the layers. A rank whose backward is over goes on to join rounds until the backward of every rank is.

Where two steps before made the same gathers, a rank announces in a round those that will follow, and all ranks agree on
what all of them announce. An agreed gather needs no round: each rank launches it when it comes to it, or, with all that
are left, before its next round, and drops what it does not need. So between two rounds all ranks launch the same
gathers in the same order, and all launch them before they wait in a round. Where all ranks foresee that more will
follow, they agree on that as well: each runs the next round when it comes to the last agreed gather, so that what comes
after it arrives while that layer computes.

[Note: few are agreed] A rank that needs another layer waits until the others have passed all that is agreed, so these
must not wait for it: not for sums of gradients, whose launch only a round shows, and which a backward must not collect;
nor for other collectives of the step, before which ranks must call as many layers. So agreed gathers end with a
forward, and in a backward they are few. A digest of whole steps in place of rounds would need an order for all of
these, with sums of gradients sent twice by ranks that differ.

Reductions of gradients go through another group: they are launched between rounds, in an order of their own. Each row
also has the number of those that its rank has launched, so that a backward waits for no others.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_hybrid.errors import RanksDiffer
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.shared_memory.transfers import start_all_gather
from lightning_hybrid.zero.forecast import Forecast
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.ranks import ShardRanks
from lightning_hybrid.zero.reductions import Reductions

_NONE = -1
_DONE = -2
# Most groups of one layer that a rank requests in a round: a layer has one per dtype.
_SLOTS = 8
_MOST_UNNEEDED = 2  # results of gathers that this rank waits for before it launches more


class GatherRounds:
    """The rounds of one rank, among the ranks of its shard group.

    Attributes:
        forecast: Of the gathers of this rank.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[ParameterGroup], reductions: Reductions) -> None:
        """Prepare rounds; collective over the world.

        The order of the groups is the same on all ranks.
        """
        # For rows in host memory, and for parameters; no other collectives go through these.
        self._headers = mesh.dedicated_group("dp_shard", "headers of gathers", "gloo")
        axes = [axis for axis in ("dp_shard", "ep_shard") if axis in mesh.axes]  # experts have fewer replicas
        gathers = {mesh.group(axis): mesh.dedicated_group(axis, "gathers") for axis in axes}
        self._groups, self._reductions, self.forecast = list(groups), reductions, Forecast()
        self._agreed: deque[int] = deque()  # to launch before the next round, by position of the group
        self._called: list[int] = []  # in the latest forward
        self._last_agreed = _NONE  # where the next round is run, if all ranks foresee what follows
        self._early: set[int] = set()  # launched before they were requested
        self._unneeded: list[tuple[dist.Work, torch.Tensor]] = []
        self._positions = {id(group): position for position, group in enumerate(self._groups)}
        for group in self._groups:
            group.gather_through(gathers)

    def request(self, requested: Sequence[ParameterGroup], prefetched: Sequence[ParameterGroup]) -> None:
        """Gather groups, and join the gathers that other ranks request.

        ``prefetched`` are of the layer after the next one, if it comes next on all ranks.
        """
        requested = [group for group in requested if group.is_sharded]
        wanted = [self._positions[id(group)] for group in requested]
        self.forecast.add([position for position in wanted if not self._groups[position].is_full])
        self._early.difference_update(wanted)
        while self._agreed and not all(group.is_full_or_gathering for group in requested):
            self._launch_agreed(wanted)
        missing = [self._positions[id(group)] for group in requested if not group.is_full_or_gathering]
        while missing:
            row, missing = missing[:_SLOTS], missing[_SLOTS:]
            self._run_round(row, [] if missing else self._following(prefetched))
        if self._last_agreed in wanted and not self._agreed:
            self._early.update(foreseen := self.forecast.following()[:1])
            self._run_round(foreseen, self.forecast.following(1))
        while self._agreed and len(self._early) < len(requested) and not self._groups[self._agreed[0]].is_full:
            self._early.add(self._agreed[0])
            self._launch_agreed(self._early)
        for group in requested:
            group.gather()

    def begin_backward(self) -> None:
        """Let reductions of gradients follow the layers that ranks have called."""
        self._called = self.forecast.called or self._called  # of a schedule, a backward may follow another one
        self._reductions.follow([self._groups[position] for position in self._called])

    def _following(self, prefetched: Sequence[ParameterGroup]) -> list[int]:
        """The gathers that this rank expects to come next."""
        unforeseen = [self._positions[id(group)] for group in prefetched if not group.is_full_or_gathering]
        return self.forecast.following() or unforeseen[:_SLOTS]

    def finish(self) -> None:
        """Join the rounds of the other ranks until none requests anything more."""
        while self._agreed:
            self._launch_agreed(())
        while not self._run_round([_DONE], []):
            pass
        for work, _ in self._unneeded:
            work.wait()
        self._unneeded.clear()
        self._early.clear()
        self.forecast.end_part()

    def end_step(self) -> None:
        """Launch what is agreed, also where a step has failed: later gathers come after it on all ranks."""
        with contextlib.suppress(RuntimeError):  # another rank may be gone
            while self._agreed:
                self._groups[self._agreed.popleft()].join_gather(self._unneeded, is_needed=False)
        self._early.clear()
        self._last_agreed = _NONE

    @below_read_guards
    def _launch_agreed(self, needed: Iterable[int]) -> None:
        """Launch the next agreed gather."""
        position = self._agreed.popleft()
        self._groups[position].join_gather(self._unneeded, is_needed=position in needed)
        while len(self._unneeded) > _MOST_UNNEEDED:
            self._unneeded.pop(0)[0].wait()

    @below_read_guards
    def _run_round(self, requested: Sequence[int], following: Sequence[int]) -> bool:
        """Run one round; returns whether all ranks are done."""
        self._unneeded[:] = [pair for pair in self._unneeded if not pair[0].is_completed()]
        row = [*requested, *[_NONE] * (_SLOTS - len(requested))]
        row += [self._reductions.num_launched, self._reductions.num_foreseen]
        sent = torch.tensor([*row, *following, *[_NONE] * (Forecast.MOST + 1 - len(following))])
        rows = torch.stack(list(start_all_gather(sent, self._headers)()))
        self._reductions.receive(int(rows[:, _SLOTS].min()))
        self._last_agreed = _NONE
        if bool((rows[:, 0] == _DONE).all()):
            return True
        for position in rows[:, :_SLOTS].unique().tolist():  # sorted
            if position >= 0:
                self._groups[position].join_gather(self._unneeded, is_needed=position in requested)
        self._reductions.allow(int(rows[:, _SLOTS + 1].min()))
        announced = rows[:, _SLOTS + 2 :]
        is_agreed = (announced == announced[0]).all(0) & (announced[0] != _NONE)
        agreed = following[: int(is_agreed.cumprod(0).sum())]
        self._agreed.extend(position for position in agreed if position != Forecast.MORE)
        if Forecast.MORE in agreed:
            self._last_agreed = agreed[-2]
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
