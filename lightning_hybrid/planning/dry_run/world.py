"""A planned run as any rank of its world would have it: its process groups, stages and shards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lightning_hybrid.layout import AXES, Coordinates, ParallelLayout
from lightning_hybrid.mesh import FLATTENED, ROUTED, Mesh
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.planning.plan import fake_ranks
from lightning_hybrid.run.run import Run


@dataclasses.dataclass(frozen=True)
class RanksOfGroup:
    """A process group as data, for code that asks for its size and for the place of this rank."""

    ranks: tuple[int, ...]  # global ranks, in order
    place: int  # index of this rank among them
    group_name: str  # name of its axis

    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """The index of this rank."""
        return self.place


@dataclasses.dataclass(frozen=True)
class MeshOfRank:
    """The process groups of one rank as data, with the methods of `Mesh` that read them."""

    layout: ParallelLayout  # the sizes
    rank: int  # the global rank
    coordinates: Coordinates  # its index on each axis
    groups: Mapping[str, RanksOfGroup]  # by axis
    axis_places: Mapping[str, Mapping[str, int]]  # `Mesh.places` of axes that shard parameters

    @classmethod
    def of(cls, layout: ParallelLayout, rank: int) -> MeshOfRank:
        """Build the mesh of a rank on fake process groups."""
        with fake_ranks(layout.world_size, rank):
            mesh = Mesh.build(layout, "cpu")
            axes = [*AXES, *FLATTENED, *(ROUTED if layout.joins_replicas else ())]
            groups = {}
            for axis in axes:
                ranks = tuple(dist.get_process_group_ranks(mesh.group(axis)))
                groups[axis] = RanksOfGroup(ranks, ranks.index(rank), axis)
            places = {axis: mesh.places(axis) for axis in ("tp", "cp", "dp_shard", "ep", "ep_shard") if axis in groups}
            return cls(layout, rank, mesh.coordinates, groups, places)

    def group(self, axis: str) -> Any:
        """The group of an axis."""
        return self.groups[axis]

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return self.groups[axis].size()

    def rank_in(self, axis: str) -> int:
        """The index of this rank along an axis."""
        return self.groups[axis].place

    def places(self, axis: str) -> Mapping[str, int]:
        """As `Mesh.places`."""
        return self.axis_places[axis]


def run_of_rank(run: Run, rank: int) -> Run:
    """Return a run planned by the first rank with the mesh, stages and shards of another; no more of it may be used."""
    mesh: Any = MeshOfRank.of(run.setting.layout, rank)
    plan: Any = None
    if run.plan is not None:
        plan = copy.copy(run.plan)
        plan.rank, plan.group = mesh.rank_in("pp"), mesh.group("pp")
    shardings = {
        id(each): dataclasses.replace(each, group=mesh.group(each.axis), places=_places(mesh, each.axis, each.places))
        for each in run.parts.shardings
    }
    parts = LocalShards(run.setting.module, list(shardings.values()))
    techniques = tuple(technique.of_rank(shardings) for technique in run.techniques)
    return dataclasses.replace(run, mesh=mesh, plan=plan, parts=parts, techniques=techniques)


def _places(mesh: Any, axis: str, places: Mapping[str, int]) -> Mapping[str, int]:
    return mesh.places(axis) if places else places
