"""Full backward hooks of units: they are set up where the unit runs, and nowhere else.

Torch sets them up in a module's ``__call__``, around its forward, by an autograd function on its arguments and another
on its results. On a rank that skips the unit there is nothing to hang them on; so they move into the forward.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

SET_UP = "apply:BackwardHookFunction"  # name of the event where torch sets up hooks of a module that is no unit


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether calls of this very module have full backward hooks, or hooks before its backward."""
    return bool(module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook))


@contextlib.contextmanager
def backward_hooks_inside(units: Mapping[str, nn.Module]) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """Take the hooks off these modules.

    Yields:
        By FQN, forwards with the hooks set up, of the modules that have some.
    """
    taken: list[tuple[nn.Module, dict[str, Any]]] = []
    forwards: dict[str, Callable[..., Any]] = {}
    try:
        for fqn, module in units.items():
            if has_backward_hooks(module):
                members = module.__dict__
                own = {name: members[name] for name in ("_backward_hooks", "_backward_pre_hooks")}
                forwards[fqn] = _hooked(module, own["_backward_hooks"], own["_backward_pre_hooks"])
                taken.append((module, own))
                members.update({name: OrderedDict() for name in own})
        yield forwards
    finally:
        for module, own in taken:
            for name, hooks in own.items():
                hooks.update(module.__dict__[name])  # what was registered meanwhile
            module.__dict__.update(own)


def _hooked(module: nn.Module, hooks: Mapping[int, Any], before: Mapping[int, Any]) -> Callable[..., Any]:
    """The forward of a module as torch calls it between full backward hooks."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hook = BackwardHook(module, list(hooks.values()), list(before.values()))
        result = original(*hook.setup_input_hook(args), **kwargs)
        if not isinstance(result, Tensor | tuple):
            kind = type(result).__name__
            warnings.warn(f"backward hooks are called for tensors and tuples of them, not for a {kind}", stacklevel=2)
        return hook.setup_output_hook(result)

    return forward
