"""The context of user code: arguments of steps, outputs that hooks read, and the current hook."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

# Modules whose hooks no user wrote.
LIBRARY_PREFIXES = ("lightning.", "pytorch_lightning.", "lightning_hybrid.")


def step_arguments(module: pl.LightningModule, name: str, batch: Any, batch_idx: int = 0) -> tuple[Any, ...]:
    """Return the arguments with which Lightning calls a step, as far as the step takes them.

    Raises:
        ValueError: The step fetches its own batches.
    """
    takes = inspect.signature(getattr(module, name)).parameters
    if "dataloader_iter" in takes:
        raise ValueError(
            f"{name}(dataloader_iter) fetches its own batches, which microbatches cannot share;"
            " take the batch as an argument, or set pipeline_parallel_size=1"
        )
    anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes.values())
    return (batch, batch_idx) if anything or len(takes) > 1 else (batch,)


def output_is_read(trainer: pl.Trainer, name: str) -> bool:
    """Whether any hook of the user reads the output of a step."""
    hook = f"on_{'train' if name == 'training_step' else name.removesuffix('_step')}_batch_end"
    users = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    return any(not getattr(type(user), hook, pl.Callback).__module__.startswith(LIBRARY_PREFIXES) for user in users)


def old_gradients_are_read(trainer: pl.Trainer) -> bool:
    """Whether any hook of the user runs between a step and the clearing of the gradients before it."""
    users = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return any(
        not getattr(type(user), hook, pl.Callback).__module__.startswith(LIBRARY_PREFIXES)
        for user in users
        for hook in hooks
    )


@contextlib.contextmanager
def current_hook(module: pl.LightningModule, name: str) -> Iterator[None]:
    """Set the current hook of the module, as Lightning's own calls do; ``self.log`` reads it."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before


def scripted_modules(module: nn.Module) -> list[str]:
    """Return the FQNs of the modules of ``torch.jit`` with parameters inside a module."""
    modules = module.named_modules()
    return [fqn for fqn, inner in modules if isinstance(inner, torch.jit.ScriptModule) and [*inner.parameters()]]


def why_no_stages(module: pl.LightningModule) -> str:
    """Return why no step of a module can be run in stages, whatever it does; "" if it can."""
    if not module.automatic_optimization:
        return "the module uses manual optimization, and each of its steps reads what the one before has changed"
    code = getattr(type(module).configure_optimizers, "__code__", None)
    if code is not None and "LBFGS" in code.co_names:
        return "LBFGS looks at all parameters and gradients at once, and runs the step several times for each step"
    if scripted := scripted_modules(module):
        return f"{type(module).__name__}.{scripted[0]} is a module of torch.jit, whose calls and layers cannot be seen"
    return ""
