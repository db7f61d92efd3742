"""The world that user code sees: replicas as ranks, and a device mesh."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around, reduced_as, switch_class
from lightning_hybrid.strategies.user_code.hooks import LIBRARY_PREFIXES

# The training step runs inside the first; after a failure the world matters and not what the user means.
_NOT_USER_HOOKS = frozenset({"optimizer_step", "on_exception"})
# Lightning's own callbacks that count the ranks with other data, and the one of this package that extends it.
_COUNTS_DATA = (".throughput_monitor", ".callbacks.monitors.throughput")
_CALLERS = ("_call_lightning_module_hook", "_call_lightning_datamodule_hook", "_call_callback_hooks")


class ReplicaWorld:
    """The world visible to user code, on one rank.

    Attributes:
        is_visible: Whether user code runs now.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.is_visible = False
        self._runs_code: dict[tuple[object, ...], bool] = {}
        self._loaders = contextlib.ExitStack()  # gives each its own class again
        self._loader_classes: dict[type, type] = {}  # by the user's own
        self._group = mesh.group("data")
        self._differs = mesh.size("data") < mesh.layout.world_size
        self._environment = {"RANK": str(mesh.rank_in("data")), "WORLD_SIZE": str(mesh.size("data"))}

    def visible(self) -> AbstractContextManager[None]:
        """Run user code inside."""
        return self._switched_to(True)

    def hidden(self) -> AbstractContextManager[None]:
        """Run code inside that needs the launcher's world, though the user called it."""
        return self._switched_to(False)

    def _switched_to(self, show: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if show is self.is_visible or not self._differs else self._swapped(show)

    @contextlib.contextmanager
    def _swapped(self, show: bool) -> Iterator[None]:
        if show:
            self._world = dist.group.WORLD
            self._launcher_environment = {name: os.environ[name] for name in self._environment if name in os.environ}
        groups, variables = (self._world, self._group), (self._launcher_environment, self._environment)
        self._set(show, groups[show], variables[show])
        try:
            yield
        finally:
            self._set(not show, groups[not show], variables[not show])

    def _set(self, visible: bool, group: Any, variables: dict[str, str]) -> None:
        self.is_visible = visible
        dist.distributed_c10d._update_default_pg(group)
        os.environ.update((name, variables[name]) for name in self._launcher_environment)

    def wrap_hooks(self, trainer: Any) -> Callable[[], None]:
        """Let the hooks that Lightning calls for this trainer see this world; return the undo."""
        stack = contextlib.ExitStack()
        if self._differs:
            for name in _CALLERS:
                stack.callback(around(call, name, partial(self._call_hook, trainer), reason="hooks see their replicas"))
        return stack.close

    def _call_hook(
        self, mine: Any, original: Callable[..., Any], trainer: Any, hook_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        is_users = trainer is mine and self._runs_user_code(trainer, hook_name)
        with self.visible() if is_users else contextlib.nullcontext():
            return original(trainer, hook_name, *args, **kwargs)

    def _runs_user_code(self, trainer: Any, hook_name: str) -> bool:
        """Whether a hook runs any user code; most hooks of a step are empty."""
        if hook_name in _NOT_USER_HOOKS:
            return False
        key = hook_name, *map(type, trainer.callbacks)
        if key not in self._runs_code:
            owners = (trainer.lightning_module, trainer.datamodule, *trainer.callbacks)
            hooks = [getattr(owner, hook_name, None) for owner in owners]
            modules = [getattr(hook, "__module__", None) or "" for hook in hooks if hook is not None]
            self._runs_code[key] = any(not h.startswith(LIBRARY_PREFIXES) or h.endswith(_COUNTS_DATA) for h in modules)
        return self._runs_code[key]

    def wrap_loader(self, loader: object) -> None:
        """Let datasets, samplers and workers see this world when the loader makes batches, or is asked its length."""
        if not self._differs or not isinstance(loader, DataLoader) or type(loader) in self._loader_classes.values():
            return
        own = type(loader)
        if own not in self._loader_classes:
            self._loader_classes[own] = _visible_class(own, self)
        visible = self._loader_classes[own]
        self._loaders.callback(switch_class(loader, visible, reason="datasets see their replicas"))

    def restore_loaders(self) -> None:
        """Give each loader its own class again."""
        self._loaders.close()


def _visible_class(own: Any, world: ReplicaWorld) -> type:
    """Make a class of loaders whose datasets see the user's world; copies and pickles are of the user's class.

    Python asks the class of an object for its length, and Lightning asks loaders in many places.
    """

    def length(loader: Any) -> int:
        with world.visible():
            return int(own.__len__(loader))

    def get_iterator(loader: Any) -> Any:
        with world.visible():  # workers are started here, and keep it
            iterator = own._get_iterator(loader)
        for name in ("_next_data", "_reset"):  # workers that stay begin the next epoch with the second
            if hasattr(iterator, name):
                setattr(iterator, name, _bound_method(name, iterator, world))
        return iterator

    members = {"__len__": length, "_get_iterator": get_iterator, "__reduce_ex__": reduced_as(own)}
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own)(own.__name__, (own,), {**names, **members})


def _bound_method(name: str, iterator: Any, world: ReplicaWorld) -> Callable[..., Any]:
    """Wrap a method of an iterator to run in the user's world."""
    method, this = getattr(type(iterator), name), weakref.ref(iterator)

    # An iterator that holds itself would keep its workers until it is collected as garbage.
    def call_in_user_world(*args: Any, **kwargs: Any) -> Any:
        with world.visible():
            return method(this(), *args, **kwargs)

    return call_in_user_world


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
    """

    # entered around methods that read ranks
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
