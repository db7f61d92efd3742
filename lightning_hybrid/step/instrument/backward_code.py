"""Whether a step has code of the user run in its backward: autograd functions, and hooks on gradients.

Such code need not be linear in the gradient that it receives. A function that adds the gradient of a router's auxiliary
loss adds it in full, however small the incoming gradient is.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from lightning_hybrid.patching import ReplacedAll
from lightning_hybrid.step.instrument.intercept_or_refuse_autograd_functions import (
    APPLY_OWNER,
    NotIntercepted,
    is_user_function,
)


class BackwardCode(ReplacedAll):
    """Context that notes what the forwards inside leave for their backwards; enter it after other instruments.

    Attributes:
        has_functions: Whether an autograd function of user code was applied.
        has_hooks: Whether user code has registered a hook on the gradient of a tensor.
    """

    def __init__(self) -> None:
        super().__init__(self._replacements(), reason="notes code of the user that runs in the backward")
        self.has_functions = self.has_hooks = False

    def __enter__(self) -> BackwardCode:  # type: ignore[override]
        super().__enter__()
        return self

    @property
    def is_empty(self) -> bool:
        """Whether backwards are linear in the gradient of the loss, as far as user code is concerned."""
        return not (self.has_functions or self.has_hooks)

    def _replacements(self) -> Any:
        before = vars(APPLY_OWNER).get("apply")  # of another instrument
        register_hook = Tensor.register_hook

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and is_user_function(cls) and not issubclass(cls, NotIntercepted):
                self.has_functions = True
            if isinstance(before, classmethod):
                return before.__func__(cls, *args, **kwargs)
            original: Any = super(_SingleLevelFunction, cls)
            return original.apply(*args, **kwargs)

        def register(tensor: Tensor, hook: Any) -> Any:
            self.has_hooks |= is_user_function(hook if isinstance(hook, FunctionType | MethodType) else type(hook))
            return register_hook(tensor, hook)

        register.__name__ = "register_hook"  # by which modes know it
        yield APPLY_OWNER, "apply", classmethod(apply)
        yield Tensor, "register_hook", register
