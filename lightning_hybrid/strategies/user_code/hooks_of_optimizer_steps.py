"""Hooks on steps of optimizers that are registered after these were built, as in ``on_train_start``: they read in full.

Hooks that an optimizer has when it is built may make its step combine parameters, so the step runs in reads with them.
Later ones run in reads of their own before and after the step, under each layout of the run.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_hybrid.optimizers.replacement import STEP_HOOKS, replace_step
from lightning_hybrid.patching import replaced
from lightning_hybrid.strategies.user_code.detect_overridden_user_hooks import LIBRARY_PREFIXES

if TYPE_CHECKING:
    from lightning_hybrid.strategies.user_code.full_parameters_in_hooks import HookReads


def step_hooks(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """Return the numbers by which optimizers know the hooks on their steps."""
    return frozenset(key for each in optimizers for name in STEP_HOOKS for key in each.__dict__.get(name, ()))


@contextlib.contextmanager
def without_later_hooks(optimizers: Iterable[Optimizer], built_with: Collection[int]) -> Iterator[None]:
    """Hide all hooks on steps inside, but for those that optimizers were ``built_with``."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_hidden(optimizer, lambda key, _: key not in built_with))
        yield


def read_in_later_hooks(
    optimizer: Optimizer, built_with: Collection[int], reads: HookReads, is_sharded: Callable[[], bool]
) -> Callable[[], None]:
    """Let later hooks of the user on an optimizer's steps read full parameters and gradients; return the undo."""
    original, where = optimizer.step, f"a hook on {type(optimizer).__name__}.step"

    def is_later(key: int, hook: Any) -> bool:
        return key not in built_with and not str(getattr(hook, "__module__", "")).startswith(LIBRARY_PREFIXES)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded():
            return original(*args, **kwargs)
        with _hidden(self, is_later) as (before, after):
            args = (self, *args)
            if before:
                with reads.hook(where, is_on_all_ranks=False):
                    for hook in before:
                        if (changed := hook(self, args, kwargs)) is not None:
                            args, kwargs = changed
            result = original(*args[1:], **kwargs)
            if after:
                with reads.hook(where, is_on_all_ranks=False):
                    for hook in after:
                        hook(self, args, kwargs)
        return result

    return replace_step(optimizer, step, reason="later hooks read full parameters")


@contextlib.contextmanager
def _hidden(optimizer: Optimizer, is_hidden: Callable[[int, Any], bool]) -> Iterator[list[list[Any]]]:
    """Take hooks off an optimizer inside; yields those before the step, and those after it."""
    found: list[list[Any]] = []
    with contextlib.ExitStack() as stack:
        for name in STEP_HOOKS:
            hooks = optimizer.__dict__.get(name) or {}
            found.append([hook for key, hook in hooks.items() if is_hidden(key, hook)])
            if found[-1]:
                others = OrderedDict((key, hook) for key, hook in hooks.items() if not is_hidden(key, hook))
                stack.enter_context(replaced(optimizer, name, others, reason="later hooks have reads of their own"))
        yield found
