"""All process groups of a run: one `DeviceMesh`, made from a `ParallelLayout`.

Other files refer to an axis by name, for its group, its size, or a reduction over it. Besides the five axes of the
layout there are five flattened ones:

    data     dp_replicate x dp_shard: ranks that receive different batches
    replica  pp x cp x tp: ranks that have shards of one copy of the model and receive the same batch
    parts    dp_shard x tp: ranks that have shards of the same parameters, context ranks not included
    holders  the same with context ranks, where these have shards too
    world    all ranks

Experts are sharded over the data and context axes, so there is a second view of the same ranks:

    data ranks              0   1   2   3   4   5   6   7       expert_parallel_size=2, data_shard_size=4
    ep                     (0   1) (2   3) (4   5) (6   7)      shard one set of experts
    ep_replicate           (0 2 4 6) (1 3 5 7)                  have the same experts, and average their gradients
    ep_shard               (0   2) (1   3) (4   6) (5   7)      of these, ranks in one ZeRO shard group
    ep_outer               (0   4) (1   5) (2   6) (3   7)      of these, ranks in different ZeRO shard groups

Experts are sharded over context ranks first, which are neighbours, then over data ranks: with expert_parallel_size=4
and context_parallel_size=2 each group is 2 data ranks x 2 context ranks. Where experts are sharded over more data ranks
than ZeRO's shard group has, `parts` is these x tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import AXES, Coordinates, ParallelLayout
from lightning_hybrid.shared_memory.gloo_exit import end_after_gloo

FLATTENED: Mapping[str, tuple[str, ...]] = {
    "data": ("dp_replicate", "dp_shard"),
    "replica": ("pp", "cp", "tp"),
    "parts": ("dp_shard", "tp"),
    "world": AXES,
}
ROUTED = ("ep", "ep_shard", "ep_outer", "ep_replicate")  # axes of experts, where ranks share these

Reduction = Literal["sum", "mean", "max", "min"]

# gloo has no mean, so a mean is a sum that is divided afterwards, on every backend.
_REDUCE_OPS = {"sum": ReduceOp.SUM, "mean": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The process groups of one rank, by the name of their axis; made by `Mesh.build`.

    Attributes:
        layout: the sizes that this mesh was built from.
        rank: the global rank of this process.
        coordinates: the coordinates of this rank.
        device_mesh: the mesh over the five axes of the layout, outermost first; an axis of size 1 has a group too.
        sharded_axes: axes whose ranks have shards of parameters instead, set by `with_shards_over`.
        timeout: of each collective operation; torch's default if None.
    """

    layout: ParallelLayout
    rank: int
    coordinates: Coordinates
    device_mesh: DeviceMesh
    _submeshes: Mapping[str, DeviceMesh] = field(repr=False)
    sharded_axes: tuple[str, ...] = ()
    timeout: timedelta | None = None
    _further: dict[str, ProcessGroup] = field(default_factory=dict, repr=False)  # shared with meshes made of this one

    @classmethod
    def build(cls, layout: ParallelLayout, device_type: str, timeout: timedelta | None = None) -> Mesh:
        """Make all process groups of a layout; collective, so every rank of the world calls it with the same layout.

        Args:
            layout: the sizes; their product is the world size.
            device_type: where the tensors to communicate live, "cpu" or "cuda".
            timeout: of each collective operation, in each group; torch's default if None.

        Raises:
            LayoutError: the layout does not fill the world.
            RuntimeError: `torch.distributed` has no process group yet.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "Mesh.build needs the world's process group, and there is none; "
                "call torch.distributed.init_process_group first (Lightning's strategies do)"
            )
        if layout.world_size != dist.get_world_size():
            sizes = "*".join(str(size) for size in layout.sizes)
            raise LayoutError(
                f"layout needs {'*'.join(AXES)} = {sizes} = {layout.world_size} ranks but the world has "
                f"{dist.get_world_size()}; set devices={layout.world_size} or change the layout's sizes",
                entry="world-size",
            )
        end_after_gloo()
        device_mesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=AXES)
        submeshes = {axis: device_mesh[axis] for axis in AXES}
        submeshes |= {name: _flatten(device_mesh, name, axes) for name, axes in FLATTENED.items()}
        submeshes |= _expert_view(layout, device_mesh)
        submeshes.setdefault("holders", submeshes["parts"])
        if dist.get_backend() != "gloo":
            _connect(submeshes.values(), device_type)
        rank = dist.get_rank()
        mesh = cls(
            layout=layout,
            rank=rank,
            coordinates=layout.coordinates(rank),
            device_mesh=device_mesh,
            timeout=timeout,
            _submeshes=submeshes,
        )
        mesh._limit_waits(mesh.groups)
        return mesh

    def _limit_waits(self, groups: Iterable[ProcessGroup]) -> None:
        """Give groups the time limit of the run: torch gives a group that a `DeviceMesh` makes its own default."""
        for group in groups:
            if self.timeout is not None and dist.get_backend(group) in ("gloo", "nccl"):
                _set_pg_timeout(self.timeout, group)

    def group(self, axis: str) -> ProcessGroup:
        """The process group of this rank along an axis of the layout or a flattened one."""
        if axis not in self._submeshes:
            raise ValueError(f"the mesh has no axis {axis!r}; use one of {', '.join(self._submeshes)}")
        return self._submeshes[axis].get_group()

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes; axes of experts exist only where ranks share experts."""
        return tuple(self._submeshes)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return self.group(axis).size()

    def rank_in(self, axis: str) -> int:
        """The index of this rank along an axis."""
        return self.group(axis).rank()

    def all_reduce(self, tensor: torch.Tensor, axis: str, op: Reduction = "sum") -> torch.Tensor:
        """Reduce a tensor of one shape on all ranks over an axis, in place, and return it; size 1 costs nothing.

        Args:
            tensor: the addend of this rank; holds the result afterwards.
            axis: an axis of the layout or a flattened one.
            op: how to combine the ranks' tensors.
        """
        if op not in _REDUCE_OPS:
            raise ValueError(f"all_reduce over {axis} got op={op!r}; use one of {', '.join(_REDUCE_OPS)}")
        size = self.size(axis)
        if size == 1:
            return tensor
        dist.all_reduce(tensor, _REDUCE_OPS[op], group=self.group(axis))
        return tensor.div_(size) if op == "mean" else tensor

    def places(self, axis: str) -> dict[str, int]:
        """The indices of this rank along an axis that shards parameters, by the factors of the axis.

        ZeRO's shard group and the expert group overlap: the smaller of the two is the factor "inner", the larger one
        "inner" x "outer". Context ranks that shard experts are "cp_inner", all of them "cp_inner" x "cp_outer".

        Args:
            axis: "tp", "cp", "dp_shard", "ep" or "ep_shard".
        """
        if axis == "tp" or (axis == "dp_shard" and self.sharded_axes):
            return {axis: self.rank_in(axis)}
        cp_outer, cp_inner = divmod(self.rank_in("cp"), self.layout.expert_contexts)
        if axis == "cp":
            return {"cp_inner": cp_inner, "cp_outer": cp_outer}
        sizes = self.layout.data_shard_size, self.layout.expert_replicas
        outer, inner = divmod(self.layout.data_rank(self.rank) % max(sizes), min(sizes))
        if axis == "ep_shard":
            return {"outer": outer}
        size = sizes[0] if axis == "dp_shard" else sizes[1]
        indices = {"inner": inner, "outer": outer} if size == max(sizes) else {"inner": inner}
        return indices | ({"cp_inner": cp_inner} if axis == "ep" else {})

    @property
    def groups(self) -> list[ProcessGroup]:
        """All process groups of this rank, and of meshes made of this one."""
        groups = [submesh.get_group() for submesh in self._submeshes.values()]
        return list({id(group): group for group in (*groups, *self._further.values())}.values())

    def dedicated_group(self, axis: str, purpose: str, backend: str | None = None) -> ProcessGroup:
        """Make, or return, an additional group of the ranks along an axis, with an independent order; collective.

        Args:
            axis: an axis of the layout or a flattened one.
            purpose: use of the group; there is one group for each.
            backend: backend of the group; that of the world if None.
        """
        name = f"{purpose} of {axis}{''.join(f', {shared} shared' for shared in self.sharded_axes)}"
        if name not in self._further:
            rows: list[list[int]] = [[] for _ in range(self.layout.world_size)]
            dist.all_gather_object(rows, dist.get_process_group_ranks(self.group(axis)))
            for ranks in sorted(map(list, set(map(tuple, rows)))):
                group = dist.new_group(ranks, backend=backend, timeout=self.timeout)
                if self.rank in ranks:
                    self._further[name] = group
        return self._further[name]

    def dedicated_world(self) -> ProcessGroup | None:
        """Make an additional gloo group of all ranks, for a thread beside the training; collective.

        Returns None if there is one rank.
        """
        if self.layout.world_size == 1:
            return None
        group = dist.new_group(backend="gloo", timeout=self.timeout)
        assert isinstance(group, ProcessGroup)
        return group

    def with_shards_over(self, axes: Iterable[str]) -> Mesh:
        """A mesh in which ranks along some axes have shards of parameters, and each runs a share of the batch.

        Each of these axes has size 1 then; `dp_shard`, `data`, `parts` and `holders` include their ranks, and `shares`
        consists of these only. Collective.

        Args:
            axes: any of "pp", "cp" and "tp".
        """
        base, shared = self.device_mesh, set(axes)
        single = next((self._submeshes[axis] for axis in AXES if self.size(axis) == 1), None)
        if single is None:
            ranks = torch.arange(self.layout.world_size).view(-1, 1)
            single = DeviceMesh(base.device_type, ranks, mesh_dim_names=("ranks", "single"))["single"]
        wider = {
            "shares": shared,
            "dp_shard": shared | {"dp_shard"},
            "data": shared | {"dp_replicate", "dp_shard"},
            "parts": shared | {"dp_shard", "tp"},
        }
        submeshes = {
            name: _flatten(base, f"shared_{name}", tuple(axis for axis in AXES if axis in members))
            for name, members in wider.items()
        }
        submeshes |= {"holders": submeshes["parts"], **dict.fromkeys(shared, single)}
        if dist.get_backend() != "gloo":
            _connect(submeshes.values(), base.device_type)
        self._limit_waits(submesh.get_group() for submesh in submeshes.values())
        over = f"over shards of {', '.join(sorted(shared))}"
        self._further.update((f"{name} {over}", submesh.get_group()) for name, submesh in submeshes.items())
        return replace(self, _submeshes={**self._submeshes, **submeshes}, sharded_axes=tuple(sorted(shared)))

    def published(self) -> DeviceMesh:
        """The mesh that user code finds at `LightningModule.device_mesh`.

        Its two dimensions have the names of Lightning's `ModelParallelStrategy`, `data_parallel` and
        `tensor_parallel`, and the groups of this mesh: nothing new is created.
        """
        pp, _, _, cp, _ = self.device_mesh.get_coordinate() or ()
        ranks = self.device_mesh.mesh[pp, :, :, cp, :].flatten(0, 1)
        return DeviceMesh.from_group(
            [self.group("data"), self.group("tp")],
            self.device_mesh.device_type,
            ranks,
            mesh_dim_names=("data_parallel", "tensor_parallel"),
        )


def _expert_view(layout: ParallelLayout, device_mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """The axes of experts, if there are several ranks of them; and the axes that become larger by them."""
    if layout.expert_parallel_size == 1:
        return {}
    size, contexts = layout.expert_replicas, layout.expert_contexts
    inside = max(1, layout.data_shard_size // size)
    data = layout.data_parallel_size // (size * inside), inside, size
    context = layout.context_parallel_size // contexts, contexts
    view = layout.pipeline_parallel_size, *data, *context, layout.tensor_parallel_size
    names = ("pp", "ep_outer_data", "ep_shard", "ep_data", "ep_outer_cp", "ep_cp", "tp")
    experts = DeviceMesh(device_mesh.device_type, device_mesh.mesh.reshape(view), mesh_dim_names=names)
    submeshes = {
        "ep": _flatten(experts, "ep", ("ep_data", "ep_cp")),
        "ep_shard": experts["ep_shard"],
        "ep_outer": _flatten(experts, "ep_outer", ("ep_outer_data", "ep_outer_cp")),
        "ep_replicate": _flatten(experts, "ep_replicate", ("ep_outer_data", "ep_shard", "ep_outer_cp")),
    }
    parts = ("ep_shard", "ep_data", "tp") if inside > 1 else ("ep_data", "tp")
    if size > layout.data_shard_size:
        submeshes["parts"] = _flatten(experts, "ep_parts", parts)
    if contexts > 1:
        submeshes["holders"] = _flatten(experts, "ep_holders", (*parts[:-1], "ep_cp", "tp"))
    return submeshes


def _connect(submeshes: Iterable[DeviceMesh], device_type: str) -> None:
    """Make NCCL's communicators now, in one order on all ranks; otherwise the first collective of a group does."""
    groups = {id(submesh.get_group()): submesh.get_group() for submesh in submeshes}
    for group in groups.values():
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device_type), group=group)


def _flatten(device_mesh: DeviceMesh, name: str, axes: tuple[str, ...]) -> DeviceMesh:
    """Flatten several dimensions into one; if at most one of them has several ranks, reuse that one and its group."""
    assert device_mesh.mesh_dim_names is not None
    sizes = dict(
        zip(device_mesh.mesh_dim_names, device_mesh.shape, strict=True)
    )  # making a submesh to read its size would cost more
    longer = [axis for axis in axes if sizes[axis] > 1] or [axes[0]]
    # `_flatten` is private to torch, but the only call that flattens dimensions that are not adjacent (pp, cp, tp).
    return device_mesh[longer[0]] if len(longer) == 1 else device_mesh[tuple(longer)]._flatten(name)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that the connection to another rank was lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and ("gloo/transport" in str(error) or "pair closure" in str(error))
