"""The world that user code sees: the ranks that hold other data.

Ranks of one replica hold parts of one copy of the model. While code of the user's runs, the default process group,
``get_rank``, ``get_world_size``, ``trainer.global_rank``, ``trainer.world_size`` and the environment's ``RANK`` and
``WORLD_SIZE`` mean the data axes, so that gathers and datasets written by hand are right. Lightning's own code, and
ours, sees the launcher's world.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around, reduced_as
from lightning_hybrid.strategies.user_code.hook_context import NOT_OF_THE_USER

# The training step runs inside the first; after a failure the world matters and not what the user means.
_NOT_THE_USERS = frozenset({"optimizer_step", "on_exception"})
# Lightning's own callbacks that count the ranks with other data.
_COUNTS_DATA = (".throughput_monitor",)
_CALLERS = ("_call_lightning_module_hook", "_call_lightning_datamodule_hook", "_call_callback_hooks")


class UserWorld:
    """The world as the user's code sees it, on one rank.

    Attributes:
        is_shown: Whether the user's code runs now.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Args: mesh: of this run."""
        self.is_shown = False
        self._written: dict[tuple[str, int], bool] = {}
        self._loaders: list[tuple[weakref.ref[DataLoader[Any]], type]] = []  # with the class that each had
        self._loader_classes: dict[type, type] = {}  # by the user's own
        self._group = mesh.group("data")
        self._differs = mesh.size("data") < mesh.layout.world_size
        self._environment = {"RANK": str(mesh.rank_in("data")), "WORLD_SIZE": str(mesh.size("data"))}

    def shown(self) -> AbstractContextManager[None]:
        """Code of the user's runs inside."""
        return self._turned(True)

    def hidden(self) -> AbstractContextManager[None]:
        """Code that needs the launcher's world runs inside, though the user called it."""
        return self._turned(False)

    def _turned(self, show: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if show is self.is_shown or not self._differs else self._swapped(show)

    @contextlib.contextmanager
    def _swapped(self, show: bool) -> Iterator[None]:
        if show:
            self._world = dist.group.WORLD
            self._launchers = {name: os.environ[name] for name in self._environment if name in os.environ}
        groups, variables = (self._world, self._group), (self._launchers, self._environment)
        self._set(show, groups[show], variables[show])
        try:
            yield
        finally:
            self._set(not show, groups[not show], variables[not show])

    def _set(self, shown: bool, group: Any, variables: dict[str, str]) -> None:
        self.is_shown = shown
        dist.distributed_c10d._update_default_pg(group)
        os.environ.update((name, variables[name]) for name in self._launchers)

    def show_to_hooks(self, trainer: Any) -> Callable[[], None]:
        """Let the hooks that Lightning calls for this trainer see this world; returns what undoes all that shows it."""
        stack = contextlib.ExitStack()
        stack.callback(self._leave_loaders)
        if self._differs:
            for name in _CALLERS:
                stack.callback(around(call, name, partial(self._call_hook, trainer), reason="hooks see their replicas"))
        return stack.close

    def _call_hook(
        self, mine: Any, original: Callable[..., Any], trainer: Any, hook_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        is_users = trainer is mine and self._is_the_users(trainer, hook_name)
        with self.shown() if is_users else contextlib.nullcontext():
            return original(trainer, hook_name, *args, **kwargs)

    def _is_the_users(self, trainer: Any, hook_name: str) -> bool:
        """Whether any code of the user's runs in a hook; most hooks of a step are empty."""
        if hook_name in _NOT_THE_USERS:
            return False
        key = hook_name, len(trainer.callbacks)
        if key not in self._written:
            owners = (trainer.lightning_module, trainer.datamodule, *trainer.callbacks)
            hooks = [getattr(owner, hook_name, None) for owner in owners]
            homes = [getattr(hook, "__module__", None) or "" for hook in hooks if hook is not None]
            self._written[key] = any(not h.startswith(NOT_OF_THE_USER) or h.endswith(_COUNTS_DATA) for h in homes)
        return self._written[key]

    def show_to_loader(self, loader: object) -> None:
        """Let datasets, samplers and workers see this world when the loader makes batches, or is asked how many."""
        if not self._differs or not isinstance(loader, DataLoader) or type(loader) in self._loader_classes.values():
            return
        own = type(loader)
        if own not in self._loader_classes:
            self._loader_classes[own] = _shown_class(own, self.shown)
        _turn_into(self._loader_classes[own], loader)
        self._loaders.append((weakref.ref(loader), own))

    def _leave_loaders(self) -> None:
        """Loaders see the launcher's world again."""
        for reference, own in self._loaders:
            if (loader := reference()) is not None:
                _turn_into(own, loader)
        self._loaders.clear()


def _shown_class(own: Any, shown: Callable[[], AbstractContextManager[None]]) -> type:
    """A class of loaders whose parts see the user's world; what is copied or pickled is of the user's class again.

    Python asks the class of an object for its length, and many places of Lightning's ask loaders.
    """

    def length(loader: Any) -> int:
        with shown():
            return int(own.__len__(loader))

    def get_iterator(loader: Any) -> Any:
        with shown():  # workers are started here, and keep it
            iterator = own._get_iterator(loader)
        for name in ("_next_data", "_reset"):  # workers that stay begin the next epoch with the second
            if hasattr(iterator, name):
                setattr(iterator, name, _bound(name, iterator, shown))
        return iterator

    members = {"__len__": length, "_get_iterator": get_iterator, "__reduce_ex__": reduced_as(own)}
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own)(own.__name__, (own,), {**names, **members})


def _bound(name: str, iterator: Any, shown: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    """A method of an iterator that runs in the user's world."""
    method, this = getattr(type(iterator), name), weakref.ref(iterator)

    # An iterator that holds itself would keep its workers until it is collected as garbage.
    def call_in_user_world(*args: Any, **kwargs: Any) -> Any:
        with shown():
            return method(this(), *args, **kwargs)

    return call_in_user_world


def _turn_into(kind: type, loader: DataLoader[Any]) -> None:
    object.__setattr__(loader, "__class__", kind)  # Lightning notes what is set in the hooks that make loaders
