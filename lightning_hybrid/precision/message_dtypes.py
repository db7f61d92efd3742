"""Dtypes of the messages between replicas: of averages of gradients, and of gathers of sharded parameters."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from lightning_hybrid.errors import PrecisionError

MessageDtype = Literal["float32", "bfloat16", "float16", "float64"]


def parse_message_dtype(option: str, value: str | torch.dtype | None) -> torch.dtype | None:
    """Turn the name of a dtype into the dtype."""
    name = str(value).removeprefix("torch.")
    if value is None:
        return None
    if name not in get_args(MessageDtype):
        raise PrecisionError(
            f"{option}={value!r} is no dtype of messages; use one of {', '.join(get_args(MessageDtype))}, or leave it"
            " out for the dtype of the parameters",
            entry="precision-message-dtype",
        )
    return getattr(torch, name)


def message_dtypes(plugin: object) -> dict[str, torch.dtype | None]:
    """Return ``reduce_dtype`` and ``gather_dtype`` of a precision plugin; None where it has no such option."""
    return {name: getattr(plugin, name, None) for name in ("reduce_dtype", "gather_dtype")}
