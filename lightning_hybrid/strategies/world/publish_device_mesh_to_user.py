"""The device mesh at ``LightningModule.device_mesh``, with the launcher's ranks."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def _in_launcher_world(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def inside(mesh: PublishedMesh, *args: Any, **kwargs: Any) -> Any:
        with mesh.launcher_world():
            result = method(mesh, *args, **kwargs)
        return published(result, mesh.launcher_world) if isinstance(result, DeviceMesh) else result

    return inside


class PublishedMesh(DeviceMesh):
    """A mesh whose submeshes and coordinates are the same wherever they are read.

    A ``DeviceMesh`` finds its coordinates by ``get_rank``, which means the data axes while user code runs.

    Attributes:
        launcher_world: Entered around methods that read ranks.
    """

    launcher_world: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    __getitem__ = _in_launcher_world(DeviceMesh.__getitem__)
    get_rank = _in_launcher_world(DeviceMesh.get_rank)
    get_local_rank = _in_launcher_world(DeviceMesh.get_local_rank)
    get_group = _in_launcher_world(DeviceMesh.get_group)
    get_all_groups = _in_launcher_world(DeviceMesh.get_all_groups)
    __repr__ = _in_launcher_world(DeviceMesh.__repr__)

    @property
    def mesh(self) -> Tensor:
        """The ranks, of shape (size of the first dimension, size of the second, ...)."""
        with self.launcher_world():
            return super().mesh

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles a plain ``DeviceMesh``: the run is over for the process that loads it."""
        state = super().__getstate__()
        state.pop("launcher_world", None)
        return copyreg._reconstructor, (DeviceMesh, object, None), state  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> PublishedMesh:
        """Return the same mesh: a copy of the module is on it too."""
        return self


def published(mesh: DeviceMesh, launcher_world: Callable[[], AbstractContextManager[None]]) -> DeviceMesh:
    """Turn a mesh of the launcher's ranks into a `PublishedMesh`, for user code."""
    mesh.__class__ = PublishedMesh
    mesh.__dict__["launcher_world"] = launcher_world
    return mesh
