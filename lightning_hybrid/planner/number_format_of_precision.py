"""The `NumberFormat` of a precision as the Trainer spells it, with the states of the run's optimizer."""

from __future__ import annotations

import dataclasses

from lightning_hybrid.planner.plan_layout import FORMATS, NumberFormat

_OTHER_NAMES = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed", "64": "64-true"}
_SAME_BYTES = {"16-true": "bf16-true", "64-true": "32-true"}


def number_format_of(precision: str, state_bytes: float | None = None) -> NumberFormat:
    """Return the bytes of parameters, gradients and states.

    Args:
        precision: As the Trainer spells it, or a key of `FORMATS`.
        state_bytes: Bytes of the optimizer's states per parameter; those of Adam if None.

    Raises:
        ValueError: The precision is unknown.
    """
    name = _OTHER_NAMES.get(str(precision), str(precision))
    found = FORMATS.get(name) or FORMATS.get(_SAME_BYTES.get(name, ""))
    if found is None:
        raise ValueError(f"precision={precision!r} is unknown to the planner; use one of {', '.join(FORMATS)}")
    if name == "16-true":
        found = dataclasses.replace(found, name=name, products="float16")
    if name == "64-true":
        doubled = {field: 2 * getattr(found, field) for field in _SIZES}
        found = dataclasses.replace(found, name=name, **doubled)
    return found if state_bytes is None else dataclasses.replace(found, state=state_bytes)


_SIZES = ("activation", "parameter", "compute_copy", "gradient", "state", "gathered", "reduced")
