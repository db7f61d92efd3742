"""Dtypes of the messages between replicas: of averages of gradients, and of gathers of sharded parameters."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from lightning_hybrid.errors import PrecisionError

MessageDtype = Literal["float32", "bfloat16", "float16", "float64"]


def parse_message_dtype(option: str, value: str | torch.dtype | None) -> torch.dtype | None:
    """Turn the name of a dtype into the dtype.

    Args:
        option: For messages.
        value: A name such as "bfloat16", a dtype of floating point, or None.

    Raises:
        PrecisionError: It is another one.
    """
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


def check_gather_dtype(plugin: object, *, zero_stage: int, is_manual: bool) -> None:
    """Check that parameters are gathered, and that no step reads the rounded values, if their dtype is requested.

    Args:
        plugin: Of the precision.
        zero_stage: Of the run.
        is_manual: Whether the module calls its optimizers itself (manual optimization).

    Raises:
        PrecisionError: They are not.
    """
    dtype = message_dtypes(plugin)["gather_dtype"]
    if dtype is None:
        return
    if zero_stage == 0:
        raise PrecisionError(
            f"gather_dtype={dtype} is for parameters that ZeRO gathers, but zero_stage=0 gathers none;"
            " set zero_stage=1, 2 or 3, or leave it out",
            entry="precision-message-unused",
        )
    if is_manual:
        raise PrecisionError(
            f"gather_dtype={dtype}: in manual optimization optimizers step full parameters, of which"
            " the gathered values would be rounded; leave it out, or use automatic optimization",
            entry="precision-message-unused",
        )
