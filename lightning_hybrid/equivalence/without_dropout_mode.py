"""A function mode that switches dropout off, for comparisons of losses."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.equivalence.deterministic_mode import DROPOUT_POSITIONS


class WithoutDropoutMode(TorchFunctionMode):
    """Makes dropout, and that of attention, return its input; modules stay in training mode, and other draws remain."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        position = DROPOUT_POSITIONS.get(name)
        if position is not None:
            args = args[:position] + (0.0,) * (len(args) > position) + args[position + 1 :]
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
