"""What a step tells the loggers itself (`self.logger.experiment.add_scalar("x", loss.item())`) is told once, after it.

While a step runs, the trainer's loggers are stand-ins that note calls in a list on the module. So these calls are
something that the step keeps, and become those of the whole batch with the real numbers, on every rank; recordings and
rehearsals leave none. After the step the loggers get them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_hybrid.patching import keep_clean, replaced

# Attribute of the module while steps may run.
_CALLS = "_hybrid_logger_calls"


class _Noted:
    """Passes for a logger, or for its experiment; attributes are those of the real one, calls are noted."""

    def __init__(self, real: Callable[[], Any], calls: list[Any], place: tuple[Any, ...], is_logger: bool) -> None:
        self.__dict__.update(_real=real, _calls=calls, _place=place, _is_logger=is_logger)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._real())

    def __getattr__(self, name: str) -> Any:
        if self._is_logger and name == "experiment":
            return _Noted(lambda: self._real().experiment, self._calls, (*self._place, name), is_logger=False)
        real = getattr(self._real(), name)
        if not callable(real) or (self._is_logger and not name.startswith("log_")):
            return real

        def call(*args: Any, **kwargs: Any) -> None:
            self._calls.append((self._place, name, args, kwargs))

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._real()[key]


@contextlib.contextmanager
def noted_loggers(module: pl.LightningModule) -> Iterator[None]:
    """Let a step that runs inside note what it tells the loggers."""
    trainer = module.trainer
    loggers = trainer._loggers
    if not loggers or isinstance(vars(loggers[0]).get("_calls"), list):
        yield
        return
    calls = vars(module).setdefault(_CALLS, [])
    keep_clean(type(module))
    noted = [
        _Noted(lambda logger=logger: logger, calls, (index,), is_logger=True)  # type: ignore[misc]
        for index, logger in enumerate(loggers)
    ]
    with replaced(trainer, "_loggers", noted, reason="loggers are told once, after the step"):
        yield


def tell_loggers(module: pl.LightningModule) -> None:
    """Make the calls that a step noted: lists that microbatches append to have an entry per batch."""
    calls = vars(module).get(_CALLS)
    if not calls:
        return
    noted = list(calls)
    calls.clear()
    for place, name, args, kwargs in noted:
        target: Any = module.trainer.loggers[place[0]]
        for attribute in place[1:]:
            target = getattr(target, attribute)
        getattr(target, name)(*args, **kwargs)


def forget_calls(module: pl.LightningModule) -> None:
    """After the run."""
    vars(module).pop(_CALLS, None)
