"""What the user's code sees of the world: the ranks that hold other data.

Ranks of one replica hold parts of one copy of the model. While code of the user's runs, the default process group,
``get_rank``, ``get_world_size``, ``trainer.global_rank``, ``trainer.world_size`` and the environment's ``RANK`` and
``WORLD_SIZE`` mean the data axes, so that gathers and datasets written by hand are right. Lightning's own code, and
ours, sees the launcher's world.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.strategies.user_code import NOT_OF_THE_USER

# The training step runs inside the first; after a failure the world matters and not what the user means.
_NOT_THE_USERS = frozenset({"optimizer_step", "on_exception"})
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
        """Let the hooks that Lightning calls for this trainer see this world; returns what undoes it."""
        stack = contextlib.ExitStack()
        if self._differs:
            for name in _CALLERS:
                original = getattr(call, name)
                setattr(call, name, self._caller(trainer, original))
                stack.callback(setattr, call, name, original)
        return stack.close

    def _caller(self, mine: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def caller(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            if trainer is not mine or not self._is_the_users(trainer, hook_name):
                return original(trainer, hook_name, *args, **kwargs)
            with self.shown():
                return original(trainer, hook_name, *args, **kwargs)

        return caller

    def _is_the_users(self, trainer: Any, hook_name: str) -> bool:
        """Whether any code of the user's runs in a hook; most hooks of a step are empty."""
        if hook_name in _NOT_THE_USERS:
            return False
        key = hook_name, len(trainer.callbacks)
        if key not in self._written:
            owners = (trainer.lightning_module, trainer.datamodule, *trainer.callbacks)
            hooks = [getattr(owner, hook_name, None) for owner in owners]
            homes = [getattr(hook, "__module__", None) or "" for hook in hooks if hook is not None]
            self._written[key] = any(not home.startswith(NOT_OF_THE_USER) for home in homes)
        return self._written[key]

    def show_to_loader(self, loader: object) -> None:
        """Let datasets, samplers and workers see this world when the loader makes batches."""
        if not self._differs or not isinstance(loader, DataLoader) or "_get_iterator" in vars(loader):
            return
        get_iterator: Any = loader._get_iterator

        def get_in_user_world() -> Any:
            with self.shown():  # workers are started here, and keep it
                iterator = get_iterator()
            following, this = type(iterator)._next_data, weakref.ref(iterator)

            # An iterator that holds itself would keep its workers until it is collected as garbage.
            def next_in_user_world() -> Any:
                with self.shown():
                    return following(this())

            iterator._next_data = next_in_user_world
            return iterator

        loader._get_iterator = get_in_user_world  # type: ignore[method-assign]
