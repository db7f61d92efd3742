"""Hooks of the user's module and callbacks, wrapped so that they read full parameters and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import nn

from lightning_hybrid.params.reads.hooks import HookReads
from lightning_hybrid.patching import replace, replaced, wraps
from lightning_hybrid.strategies.user_code.hooks import closures_wrapped, is_of_user

_AROUND_STEP = "optimizer_step"
_INSIDE_HOOK = "Lightning's own code, called by a hook"
_ROUNDS = ("train", "validation", "test", "predict")
# Hooks that run while the module may be sharded, on every rank; in the last one the training step runs.
_HOOKS = (
    "on_fit_start",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "configure_gradient_clipping",
    "backward",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    *(f"on_{round}_model_{mode}" for round in _ROUNDS[1:] for mode in ("eval", "train", "zero_grad")),
    *(f"on_{round}_{when}_{end}" for round in _ROUNDS for when in ("epoch", "batch") for end in ("start", "end")),
    *(f"on_{round}_start" for round in _ROUNDS),
    *(f"on_{round}_end" for round in _ROUNDS[1:]),
    _AROUND_STEP,
)


@dataclasses.dataclass(frozen=True)
class HookWatch:
    """Wraps hooks of the user in reads of full parameters."""

    trainer: pl.Trainer  # its callbacks are wrapped too
    owner: Any  # the owner of the run; a hook may change its layout, by the step that it runs
    reads: HookReads  # of the first layout

    @property
    def is_sharded(self) -> bool:
        """Whether the module is sharded now."""
        return not self.owner.state.is_full

    @property
    def copies(self) -> Sequence[nn.Module]:
        """Averages of the module that callbacks keep."""
        copies: Sequence[nn.Module] = self.owner.setting.averages.copies
        return copies

    def _passes(self) -> None:
        """Record that this rank has done with a hook, before it waits for the others."""
        self.owner.setting.world.progress.passes()

    def wrap(self) -> Callable[[], None]:
        """Wrap every hook that the user wrote, on these instances alone; return the undo."""
        undo, trainer = contextlib.ExitStack(), self.trainer
        for user in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
            for name in _HOOKS:
                original = getattr(user, name, None)
                calls_user = isinstance(user, BaseFinetuning) and name == "on_train_epoch_start"
                if original is not None and (is_of_user(original) or calls_user):
                    hook = self.watched(user, name, original)
                    undo.enter_context(replaced(user, name, hook, reason="hooks read in full"))
        return undo.close

    def watched(self, user: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook in reads around its own lines, but not around the optimizer steps that it runs."""
        before = f"{type(user).__name__}.{name}"
        after = f"{before} after a step"
        # What is cleared next are the gradients of the optimizer step before, which are complete.
        is_complete = name in ("on_before_zero_grad", "optimizer_zero_grad")

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if not self.is_sharded:
                return original(*args, **kwargs)
            with contextlib.ExitStack() as around, contextlib.ExitStack() as watching:
                is_watched = False

                def watch(where: str) -> None:
                    nonlocal is_watched
                    run = self.owner.run
                    reads = run.hook_reads or self.reads
                    if run.guards is not None:  # the hook reads shards, of what a step may have written in full
                        run.guards.settle()
                    complete = is_complete or self.owner.gradients_are_complete
                    watching.enter_context(reads.hook(where, is_complete=complete))
                    watching.enter_context(_without_reads_in_lightning(self.trainer, reads))
                    is_watched = True

                def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
                    @wraps(function)
                    def call(*args: Any, **kwargs: Any) -> Any:
                        nonlocal is_watched
                        if not is_watched:  # inside another one
                            return function(*args, **kwargs)
                        self._passes()
                        is_watched = False
                        watching.close()
                        result = function(*args, **kwargs)
                        watch(after)
                        return result

                    return call

                owners = [
                    (self.trainer.strategy, _AROUND_STEP),
                    *((optimizer, "step") for optimizer in self.trainer.optimizers),
                ]
                for owner, step in owners:
                    around.enter_context(replaced(owner, step, unwatched(getattr(owner, step)), reason=_INSIDE_HOOK))
                if name == _AROUND_STEP:  # its closure, in which the training step runs, may be called by hand
                    args, kwargs = closures_wrapped(args, kwargs, lambda each: _like(each, unwatched(each)))
                watch(before)
                result = original(*args, **kwargs)
                self._passes()
                return result

        return hook


class _CalledClosure(Closure):
    """Lightning's closure of a training step, as hooks receive it, with another call."""

    def __init__(self, closure: Closure, call: Callable[..., Any]) -> None:
        self.__dict__.update(vars(closure))
        self._closure, self._call = closure, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        """As `Closure.closure`; the result is the original's."""
        return self._closure.closure(*args, **kwargs)

    def consume_result(self) -> Any:
        """As `Closure.consume_result`; the result is the original's."""
        return self._closure.consume_result()


def _like(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    return _CalledClosure(original, call) if isinstance(original, Closure) else call


@contextlib.contextmanager
def _without_reads_in_lightning(trainer: pl.Trainer, reads: HookReads) -> Iterator[None]:
    """Let logs of a hook have contents, and run Lightning's own global methods without reads."""
    module, strategy = trainer.lightning_module, trainer.strategy
    with contextlib.ExitStack() as stack:

        def unwatched(owner: Any, name: str, known: Callable[[Any], Any] = lambda value: value) -> None:
            original = getattr(owner, name)

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = known((args, kwargs))
                reads.forget()  # it may change what ranks hold
                with torch._C.DisableTorchFunction():
                    return original(*args, **kwargs)

            stack.enter_context(replaced(owner, name, call, reason=_INSIDE_HOOK))

        unwatched(module, "log", reads.known)
        unwatched(module, "log_dict", reads.known)
        for logger in trainer.loggers:
            unwatched(logger, "log_metrics", reads.known)
        unwatched(trainer, "save_checkpoint")
        unwatched(trainer.precision_plugin, "clip_gradients")
        for optimizer in trainer.optimizers:
            unwatched(optimizer, "zero_grad")
        for name in ("lightning_module_state_dict", "optimizer_state", "make_full"):
            unwatched(strategy, name)
        yield


def summarize_full_parameters(callback: Any, reads: HookReads) -> Callable[[], None]:
    """Let Lightning's model summary count full parameters; return the undo."""
    original = callback.on_fit_start

    def on_fit_start(*args: Any, **kwargs: Any) -> None:
        with reads.hook("ModelSummary.on_fit_start"):
            original(*args, **kwargs)

    return replace(callback, "on_fit_start", on_fit_start, reason="reads full parameters")
