"""Hooks and steps of the user: which are overridden, how Lightning calls them, and which cannot run in stages."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.optimizers.replacement import ALL_OPTIMIZERS, HOOKS_OF_ALL, STEP_HOOKS, Place, replace_step
from lightning_hybrid.patching import replaced

if TYPE_CHECKING:
    from lightning_hybrid.params.reads.hooks import HookReads


# Modules whose hooks no user wrote.
LIBRARY_PREFIXES = ("lightning.", "pytorch_lightning.", "lightning_hybrid.")


def output_is_read(trainer: pl.Trainer, name: str) -> bool:
    """Whether any hook of the user reads the output of a step."""
    return _any_overrides(trainer, f"on_{'train' if name == 'training_step' else name.removesuffix('_step')}_batch_end")


def old_gradients_are_read(trainer: pl.Trainer) -> bool:
    """Whether any hook of the user runs between a step and the clearing of the gradients before it."""
    return _any_overrides(trainer, "on_before_zero_grad") or _any_overrides(trainer, "optimizer_zero_grad")


def is_of_user(function: object) -> bool:
    """Whether neither Lightning nor this package has written a function, or a class."""
    return not (getattr(function, "__module__", None) or "").startswith(LIBRARY_PREFIXES)


def overrides(user: Any, hook: str) -> bool:
    """Whether a module or callback of the user overrides a hook of Lightning, in its class or on the instance."""
    method = getattr(user, hook, None)
    return method is not None and is_of_user(method)


def _any_overrides(trainer: pl.Trainer, hook: str) -> bool:
    return any(overrides(user, hook) for user in (trainer.lightning_module, *trainer.callbacks))  # type: ignore[attr-defined]


def step_arguments(module: pl.LightningModule, name: str, batch: Any, batch_idx: int = 0) -> tuple[Any, ...]:
    """Return the arguments with which Lightning calls a step, as far as the step takes them.

    Raises:
        ValueError: The step fetches its own batches.
    """
    takes = inspect.signature(getattr(module, name)).parameters
    if "dataloader_iter" in takes:
        raise ValueError(
            f"{name}(dataloader_iter) fetches its own batches, and a step is recorded on a given batch; take the batch"
            " as an argument"
        )
    anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes.values())
    return (batch, batch_idx) if anything or len(takes) > 1 else (batch,)


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
        return (
            "the module uses manual optimization, and each of its optimizer steps reads what the previous one has"
            " changed"
        )
    code = getattr(type(module).configure_optimizers, "__code__", None)
    if code is not None and "LBFGS" in code.co_names:
        return (
            "LBFGS reads all parameters and gradients at once, and runs training_step several times for each optimizer"
            " step"
        )
    if scripted := scripted_modules(module):
        return f"{type(module).__name__}.{scripted[0]} is a module of torch.jit, whose layers are not visible"
    return ""


def check_scripted(module: pl.LightningModule) -> None:
    """Refuse to recompute modules of ``torch.jit``, whose calls and layers cannot be traced."""
    if scripted := scripted_modules(module):
        raise ValueError(
            f"{type(module).__name__}.{scripted[0]} is a module of torch.jit, whose layers are not visible, so that it"
            " cannot be recomputed; use the module that it was made from (with compile='units' for speed), or leave"
            " recompute out"
        )


def closures_wrapped(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Callable[..., Any]], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step, with each function among them wrapped."""
    wrapped = [wrap(each) if callable(each) else each for each in (*args, *kwargs.values())]
    return tuple(wrapped[: len(args)]), dict(zip(kwargs, wrapped[len(args) :], strict=True))


def step_hooks(optimizers: Iterable[Optimizer]) -> frozenset[int]:
    """Return the numbers by which optimizers know the hooks on their steps."""
    return frozenset(key for each in optimizers for name in STEP_HOOKS for key in each.__dict__.get(name, ()))


@contextlib.contextmanager
def without_later_hooks(optimizers: Iterable[Optimizer], built_with: Collection[int]) -> Iterator[None]:
    """Hide all hooks on steps inside, except the ones that optimizers were ``built_with``."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(hidden_hooks(optimizer, lambda key, _: key not in built_with))
        yield


def read_in_later_hooks(
    optimizer: Optimizer, built_with: Collection[int], reads: Sequence[HookReads], state: Any
) -> Callable[[], None]:
    """Let later hooks of the user on an optimizer's steps read full parameters and gradients; return the undo.

    ``reads`` are none in a step that calls optimizers itself, which has full ones. ``state`` is the module's.
    """
    original, where = optimizer.step, f"a hook on {type(optimizer).__name__}.step"

    def is_later(key: int, hook: Any) -> bool:
        return key not in built_with and is_of_user(hook)

    @contextlib.contextmanager
    def reading() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in reads:
                stack.enter_context(each.hook(where, is_on_all_ranks=False))
            yield

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if state.is_full:
            return original(*args, **kwargs)
        with (
            hidden_hooks(ALL_OPTIMIZERS, is_later, HOOKS_OF_ALL) as of_all,
            hidden_hooks(self, is_later) as own,
        ):
            before, after = ([*first, *second] for first, second in zip(of_all, own, strict=True))
            args = (self, *args)
            if before:
                with reading():
                    for hook in before:
                        if (changed := hook(self, args, kwargs)) is not None:
                            args, kwargs = changed
            result = original(*args[1:], **kwargs)
            if after:
                with reading():
                    for hook in after:
                        hook(self, args, kwargs)
        return result

    return replace_step(optimizer, step, Place.HOOKS, reason="later hooks read full parameters")


@contextlib.contextmanager
def hidden_hooks(
    owner: Any, is_hidden: Callable[[int, Any], bool], names: Sequence[str] = STEP_HOOKS
) -> Iterator[list[list[Any]]]:
    """Take hooks off an optimizer, or torch's module for all, inside; yields those before the step, and after it."""
    found: list[list[Any]] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            hooks = vars(owner).get(name) or {}
            found.append([hook for key, hook in hooks.items() if is_hidden(key, hook)])
            if found[-1]:
                others = OrderedDict((key, hook) for key, hook in hooks.items() if not is_hidden(key, hook))
                stack.enter_context(replaced(owner, name, others, reason="later hooks have reads of their own"))
        yield found
