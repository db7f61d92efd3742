"""Full backward hooks of units, set up only on the rank that runs the unit.

Torch sets them up in a module's ``__call__``, around its forward, by an autograd function on its arguments and another
on its results. On a rank that skips the unit there is no call to attach them to; so they move into the forward.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

HOOK_SETUP_EVENT = "apply:BackwardHookFunction"  # event in which torch sets up hooks of a module that is not a unit


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the module itself has full backward hooks or backward pre-hooks."""
    return bool(module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook))


@contextlib.contextmanager
def backward_hooks_inside(units: Mapping[str, nn.Module]) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """Remove the hooks from these modules while the context is active.

    Yields:
        For modules that have hooks, by FQN: a forward that sets the hooks up itself.
    """
    removed: list[tuple[nn.Module, dict[str, Any]]] = []
    forwards: dict[str, Callable[..., Any]] = {}
    try:
        for fqn, module in units.items():
            if has_backward_hooks(module):
                members = module.__dict__
                saved = {name: members[name] for name in ("_backward_hooks", "_backward_pre_hooks")}
                forwards[fqn] = _forward_with_hooks(module, saved["_backward_hooks"], saved["_backward_pre_hooks"])
                removed.append((module, saved))
                members.update({name: OrderedDict() for name in saved})
        yield forwards
    finally:
        for module, saved in removed:
            for name, hooks in saved.items():
                hooks.update(module.__dict__[name])  # hooks registered in the meantime
            module.__dict__.update(saved)


def _forward_with_hooks(module: nn.Module, hooks: Mapping[int, Any], before: Mapping[int, Any]) -> Callable[..., Any]:
    """Wraps the forward of a module as torch does for full backward hooks."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hook = BackwardHook(module, list(hooks.values()), list(before.values()))
        result = original(*hook.setup_input_hook(args), **kwargs)
        if not isinstance(result, Tensor | tuple):
            kind = type(result).__name__
            warnings.warn(f"backward hooks are called for tensors and tuples of them, not for a {kind}", stacklevel=2)
        return hook.setup_output_hook(result)

    return forward
