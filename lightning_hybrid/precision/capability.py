"""The check that a device computes in a number format, by its compute capability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_hybrid.errors import PrecisionError

if TYPE_CHECKING:
    import lightning.pytorch as pl

# The first compute capability of CUDA with arithmetic of a format, and what to use below it.
_BFLOAT16, FLOAT8 = (8, 0), (8, 9)
_NEEDED = {
    "16-mixed": (5, 3),
    "16-true": (5, 3),
    "bf16-mixed": _BFLOAT16,
    "bf16-true": _BFLOAT16,
    "float8": FLOAT8,
}


def check_one_precision(precision: str, trainer: pl.Trainer) -> None:
    """Check that the Trainer's argument is the precision of the strategy's plugin, for which Lightning ignores it."""
    asked = trainer._accelerator_connector._precision_flag
    if precision and asked not in ("32-true", precision):
        raise PrecisionError(
            f"Trainer(precision={asked!r}), but the strategy has precision_plugin with {precision!r}; delete precision="
            f" to train in {precision}, or precision_plugin= to train in {asked}",
            entry="precision-twice",
        )


def check_device_precision(precision: str, device: torch.device) -> None:
    """Check that a device has arithmetic of a number format; formats and devices without a known limit pass."""
    if device.type == "mps" and precision == "64-true":
        raise PrecisionError(
            "precision='64-true': Apple's MPS device has no float64; set precision='32-true', or accelerator='cpu'",
            entry="precision-device",
        )
    if device.type != "cuda" or precision not in _NEEDED or torch.version.hip is not None:
        return
    needed, capability = _NEEDED[precision], torch.cuda.get_device_capability(device)
    if capability >= needed:
        return
    raise PrecisionError(
        f"{precision if precision == 'float8' else f'precision={precision!r}'} needs compute capability"
        f" {dotted(needed)}, but {torch.cuda.get_device_name(device)} ({device}) has {dotted(capability)};"
        f" set {_advice(precision, capability)}",
        entry="precision-device",
    )


def _advice(precision: str, capability: tuple[int, int]) -> str:
    """Formats that the device has."""
    if capability < _NEEDED["16-mixed"]:
        return "precision='32-true'"
    if precision == "float8":
        return f"precision='{'bf16-mixed' if capability >= _BFLOAT16 else '16-mixed'}' without float8"
    return "precision='16-mixed' or '32-true'"


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as it is written, such as "8.9"."""
    return ".".join(map(str, capability))
