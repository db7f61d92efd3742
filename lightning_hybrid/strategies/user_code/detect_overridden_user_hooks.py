"""Hooks that the user overrides: which of them exist, and so what they may read."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

# Modules whose hooks no user wrote.
LIBRARY_PREFIXES = ("lightning.", "pytorch_lightning.", "lightning_hybrid.")


def output_is_read(trainer: pl.Trainer, name: str) -> bool:
    """Whether any hook of the user reads the output of a step."""
    return _any_overrides(trainer, f"on_{'train' if name == 'training_step' else name.removesuffix('_step')}_batch_end")


def old_gradients_are_read(trainer: pl.Trainer) -> bool:
    """Whether any hook of the user runs between a step and the clearing of the gradients before it."""
    return _any_overrides(trainer, "on_before_zero_grad") or _any_overrides(trainer, "optimizer_zero_grad")


def overrides(user: Any, hook: str) -> bool:
    """Whether a module or callback of the user overrides a hook of Lightning, in its class or on the instance."""
    method = getattr(user, hook, None)
    return method is not None and not (getattr(method, "__module__", None) or "").startswith(LIBRARY_PREFIXES)


def _any_overrides(trainer: pl.Trainer, hook: str) -> bool:
    return any(overrides(user, hook) for user in (trainer.lightning_module, *trainer.callbacks))  # type: ignore[attr-defined]
