"""Logger proxies: calls of a step (`self.logger.experiment.add_scalar("x", loss.item())`) are made once, after it.

While a step runs, the trainer's loggers are proxies that record calls in a list on the module. So these calls are kept
values of the step, and become those of the full batch with the real numbers, on every rank; recordings and dry runs
leave none. After the step the loggers get them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_hybrid.patching import keep_clean, replaced
from lightning_hybrid.step.recording.values_kept_on_modules import RecordedCall

# Attribute of the module while steps may run.
_CALLS = "_hybrid_logger_calls"


class _LoggerProxy:
    """Stands for a logger, or for its experiment; attributes are those of the real one, calls are recorded."""

    def __init__(self, real: Callable[[], Any], calls: list[Any], path: str, is_logger: bool) -> None:
        self.__dict__.update(_real=real, _calls=calls, _path=path, _is_logger=is_logger)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._real())

    def __getattr__(self, name: str) -> Any:
        if self._is_logger and name == "experiment":
            return _LoggerProxy(lambda: self._real().experiment, self._calls, f"{self._path}.{name}", is_logger=False)
        real = getattr(self._real(), name)
        if not callable(real) or (self._is_logger and not name.startswith("log_")):
            return real

        def call(*args: Any, **kwargs: Any) -> None:
            self._calls.append(RecordedCall(self._path, name, dict(enumerate(args)), kwargs))

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._real()[key]


@contextlib.contextmanager
def captured_loggers(module: pl.LightningModule) -> Iterator[None]:
    """Record the logger calls of a step that runs inside."""
    trainer = module.trainer
    loggers = trainer._loggers
    if not loggers or isinstance(vars(loggers[0]).get("_calls"), list):
        yield
        return
    calls = vars(module).setdefault(_CALLS, [])
    keep_clean(type(module))
    proxies = [
        _LoggerProxy(lambda logger=logger: logger, calls, str(index), is_logger=True)  # type: ignore[misc]
        for index, logger in enumerate(loggers)
    ]
    with replaced(trainer, "_loggers", proxies, reason="loggers are told once, after the step"):
        yield


def flush_logger_calls(module: pl.LightningModule) -> None:
    """Make the calls that a step recorded: lists that microbatches append to have an entry per batch."""
    calls = vars(module).get(_CALLS)
    if not calls:
        return
    recorded = list(calls)
    calls.clear()
    for path, name, args, kwargs in recorded:
        index, *attributes = path.split(".")
        target: Any = module.trainer.loggers[int(index)]
        for attribute in attributes:
            target = getattr(target, attribute)
        getattr(target, name)(*args.values(), **kwargs)


def drop_logger_calls(module: pl.LightningModule) -> None:
    """Drop recorded calls after the run."""
    vars(module).pop(_CALLS, None)
