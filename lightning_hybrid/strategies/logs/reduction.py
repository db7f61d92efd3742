"""Logged values of a step, reduced over ranks, and what loggers get: when, and the graph of the full module."""

from __future__ import annotations

import contextlib
import math
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torchmetrics import Metric

from lightning_hybrid.batch.merge import REDUCTIONS
from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.collectives.agreement import RANKS, batches_differ, losses_differ
from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.errors import BackwardStepError, RanksDisagree
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import ignore_warnings, keep_clean, replace, replaced
from lightning_hybrid.pipeline.logs import Entry, Key, keys_of
from lightning_hybrid.shared_memory.transfers import start_all_gather
from lightning_hybrid.step.recording.kept import RecordedCall
from lightning_hybrid.step.standins.numbers import is_known
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.step.tracing.refusals import line_of_return


def silence_sync_dist_advice() -> Callable[[], None]:
    """Silence Lightning's advice to pass ``sync_dist=True``, until the undo: values are the same on every rank."""
    return ignore_warnings(".*sync_dist=True.*", reason="logged values are the same on every rank")


class Shared(NamedTuple):
    """What ranks of a replica must share in a step, besides the keys that it logs."""

    digest: int = 0  # of the batch
    axes: tuple[str, ...] = ("cp", "tp")  # of the mesh, whose ranks have not compared it yet
    output: Any = None  # of a training step: its loss, or a dict with one


def log_for_all(
    module: pl.LightningModule,
    logged: Sequence[tuple[Entry, float]],
    mesh: Mesh,
    shared: Shared,
    *,
    skipped: bool = False,
) -> None:
    """Reduce logged values over the replicas, as each entry's ``reduce_fx`` says, and log them on this rank.

    Lightning leaves that to ``sync_dist=True``; without it every replica would show, and monitor, its own number.
    """
    begin_logs(module, logged, mesh, shared, skipped=skipped)()()


def log_for_replica(
    module: pl.LightningModule, logged: Sequence[tuple[Entry, float]], mesh: Mesh, shared: Shared
) -> None:
    """Log values of this replica; in validation and test they are reduced at the end of a loader.

    Raises:
        RanksDisagree: The ranks of the replica have other batches, or log other keys.
    """
    _start_comparison(logged, mesh, shared)()
    _log_each(module, logged)


def _log_each(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]]) -> None:
    for entry, value in logged:
        _log(module, entry, value, entry.total_kwargs())


def begin_logs(
    module: pl.LightningModule,
    logged: Sequence[tuple[Entry, float]],
    mesh: Mesh,
    shared: Shared,
    *,
    skipped: bool = False,
) -> Callable[[], Callable[[], None]]:
    """Start the reduction of ``log_for_all``, which a backward hides.

    ``skipped`` says whether this replica's step returned no loss, which all replicas must do together. Returns a
    function that waits for the other replicas and returns one that logs. The latter may communicate again, so all ranks
    must call it between the same collectives.
    """
    compare = _start_comparison(logged, mesh, shared)
    if mesh.size("data") == 1:

        def wait_in_replica() -> Callable[[], None]:
            compare()
            return partial(_log_each, module, logged)

        return wait_in_replica
    local = _by_key(module, logged)
    exchange = _Exchange(local, mesh, type(module), skipped=skipped)

    def wait() -> Callable[[], None]:
        compare()
        is_agreed = exchange.wait()

        def log() -> None:
            reduced = exchange.reduced() if is_agreed else _reduce_differing_keys(module, local, mesh)
            for key in [*local, *sorted(reduced.keys() - local.keys())]:
                entry, value, size, _ = reduced[key]
                known = {} if size is None else {"batch_size": round(size)}
                _log(module, entry, value, {**entry.total_kwargs(), **known})

        return log

    return wait


def _start_comparison(logged: Sequence[tuple[Entry, float]], mesh: Mesh, shared: Shared) -> Callable[[], None]:
    """Start to compare batches, losses and logged keys of ranks that compute the same; return a function that waits.

    Stages compare theirs when they exchange what was logged.
    """
    axes = [axis for axis in shared.axes if mesh.size(axis) > 1]
    if not axes:
        return lambda: None
    keys = float(zlib.crc32("|".join(entry.name for entry, _ in logged).encode()))
    local = torch.tensor([shared.digest, keys, 0, 0], dtype=torch.float64, device=mesh.device_mesh.device_type)
    accuracy = 0.0
    if type(loss := find_loss(shared.output)) is torch.Tensor and loss.is_floating_point() and loss.numel() == 1:
        local[2], local[3], accuracy = 1, loss.detach().reshape(()), _ROUNDINGS * torch.finfo(loss.dtype).eps
    gathered = {axis: start_all_gather(local, mesh.group(axis)) for axis in axes}

    def wait() -> None:
        for axis, rows in gathered.items():
            batches, all_keys, exist, losses = torch.stack(rows()).T.tolist()
            if len(set(batches)) > 1:
                raise batches_differ(batches, RANKS[axis])
            near = (math.isclose(loss, losses[0], rel_tol=_LOSS_TOLERANCE, abs_tol=accuracy) for loss in losses)
            if len(set(exist)) > 1 or not (all(near) or all(map(math.isnan, losses))):
                raise losses_differ(
                    [loss if exists else None for exists, loss in zip(exist, losses, strict=True)], RANKS[axis]
                )
            if len(set(all_keys)) > 1:
                raise RanksDisagree(
                    f"the {mesh.size(axis)} {RANKS[axis]} ranks of one replica log different keys; this one logs"
                    f" {[entry.name for entry, _ in logged]}. They compute the same numbers: log the same keys on every"
                    " rank (without `if trainer.is_global_zero:` around the call)",
                    entry="log-keys",
                )

    return wait


def _log(module: pl.LightningModule, entry: Entry, value: float, kwargs: dict[str, Any]) -> None:
    kwargs = {**kwargs, "sync_dist": False}
    if not entry.is_number:
        module.log(entry.name, entry.other, **kwargs)
        return
    if entry.metric is None:
        module.log(entry.name, torch.tensor(value, dtype=entry.dtype, device=module.device), **kwargs)
        return
    cache = torch.tensor(value, device=module.device) if is_known(value) else None
    entry.metric._forward_cache = cache  # type: ignore[assignment]
    module.log(entry.name, entry.metric, **kwargs)


def _batch_size(module: pl.LightningModule, entry: Entry) -> int | None:
    """Return Lightning's weight of this replica's value in the mean over the epoch; None if it takes none."""
    given: int | None = entry.total_kwargs().get("batch_size")
    results = module.trainer._results
    if given is not None or results is None or entry.metric is not None:
        return given
    # In training on_epoch is off unless it is asked for.
    if entry.how != "mean" or not entry.kwargs.get("on_epoch") or results.batch is None:
        return None
    return extract_batch_size(results.batch) if results.batch_size is None else results.batch_size


class _Logged(NamedTuple):
    """Value logged under a key; ``size`` weighs it in the mean over the epoch, None where Lightning takes no mean."""

    entry: Entry
    value: float
    size: float | None
    is_sure: bool = True  # whether the size is that of samples, and no guess from tensors of several lengths

    @property
    def weight(self) -> float | None:
        """The weight in a mean over replicas; None if they count equally.

        Lightning sums values times sizes over replicas and batches, so a mean of plain means would be another epoch.
        Where it guesses the size, replicas count equally, as in its values per step and in the gradient.
        """
        return self.size if self.entry.metric is None and self.entry.how == "mean" and self.is_sure else None


def _by_key(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]]) -> dict[Key, _Logged]:
    keys = keys_of(entry.name for entry, _ in logged)
    batch = None if module.trainer._results is None else module.trainer._results.batch
    samples = batch_size_of(batch)
    values = []
    for entry, value in logged:
        size = _batch_size(module, entry)
        values.append(_Logged(entry, value, size, "batch_size" in entry.total_kwargs() or size == samples))
    return dict(zip(keys, values, strict=True))


class _Exchange:
    """Reduces the values that replicas logged if all of them logged the same keys, in any order."""

    def __init__(self, local: dict[Key, _Logged], mesh: Mesh, kind: type, *, skipped: bool) -> None:
        self._kind = kind
        self._own = {key: local[key] for key in sorted(local)}
        self._skipped = skipped
        self._count, self._group = mesh.size("data"), mesh.group("data")
        self._device = mesh.device_mesh.device_type
        values = [one.value if one.weight is None else one.value * one.weight for one in self._own.values()]
        self._numbers = [*values, *(logged.size or 0 for logged in self._own.values())]
        # Halves of a checksum and their squares: all are equal if and only if count * sum of squares = square of sum,
        # which is the same on every rank. Sums of so small numbers are exact.
        meant = [(key, logged.entry.how, logged.weight is None) for key, logged in self._own.items()]
        halves = divmod(zlib.crc32(repr(meant).encode()), 1 << 16)
        header = [float(skipped), *halves, *(half * half for half in halves)]
        row = torch.tensor(header + self._numbers[:_SENT], dtype=torch.float64)
        self._row = torch.nn.functional.pad(row, (0, _HEADER + _SENT - len(row))).to(self._device)
        self._work = dist.all_reduce(self._row, group=self._group, async_op=True)

    def wait(self) -> bool:
        """Wait for the others; return whether all logged the same keys.

        Raises:
            RanksDisagree: Some replicas returned no loss.
        """
        self._work.wait()
        num_skipped, *sums = self._row.tolist()
        self._sums = sums[_HEADER - 1 :]
        if num_skipped not in (0, self._count):
            raise RanksDisagree(
                f"training_step ({line_of_return(self._kind, 'training_step')}) returned None on {num_skipped:.0f} of"
                f" {self._count} replicas, this one {'included' if self._skipped else 'not among them'}; a step is"
                " skipped by all replicas or by none: return a loss of zero that depends on the model"
                " (0.0 * output.sum()) instead",
                entry="skipped",
            )
        high, low, high_squares, low_squares = map(int, sums[: _HEADER - 1])
        return high**2 == self._count * high_squares and low**2 == self._count * low_squares

    def reduced(self) -> dict[Key, _Logged]:
        """Return the reduced values; one more collective for numbers that had no room, one for maxima and minima."""
        num_keys = len(self._own)
        totals = self._sums[: len(self._numbers)]
        if len(self._numbers) > _SENT:
            rest = torch.tensor(self._numbers[_SENT:], dtype=torch.float64, device=self._device)
            dist.all_reduce(rest, group=self._group)
            totals = self._sums + rest.tolist()
        hows = [logged.entry.how for logged in self._own.values()]
        signs = [-1.0 if how == "min" else 1.0 for how in hows]
        largest = [sign * number for sign, number in zip(signs, self._numbers[:num_keys], strict=True)]
        if "max" in hows or "min" in hows:
            # A maximum over ranks may hide NaN, so whether there is one goes along.
            signed = torch.tensor([largest, list(map(math.isnan, largest))], dtype=torch.float64, device=self._device)
            dist.all_reduce(signed, dist.ReduceOp.MAX, group=self._group)
            largest = [math.nan if is_nan else number for number, is_nan in zip(*signed.tolist(), strict=True)]
        reduced = {}
        for position, (key, own) in enumerate(self._own.items()):
            total, size = totals[position], None if own.size is None else totals[num_keys + position]
            extremes = {"sum": total, "max": largest[position], "min": -largest[position]}
            total_weight = self._count if own.weight is None else size
            mean = total / total_weight if total_weight else math.nan
            value = extremes.get(own.entry.how, mean) if is_known(own.value) else own.value
            reduced[key] = _Logged(own.entry, value, size)
        return reduced


_HEADER, _SENT = 5, 123  # numbers
# Kernels may round differently on ranks that compute the same loss, more so where its terms cancel.
_LOSS_TOLERANCE, _ROUNDINGS = 1e-2, 16


def _reduce_differing_keys(module: pl.LightningModule, local: dict[Key, _Logged], mesh: Mesh) -> dict[Key, _Logged]:
    """Reduce each value over the replicas that logged it; collective, and slower than if all log the same."""
    fqns = {id(metric): fqn for fqn, metric in module.named_modules()}
    sent = {key: _sent(logged, fqns) for key, logged in local.items()}
    all_replicas = gather_on_all(sent, mesh.group("data"))
    reduced = {}
    for key in sorted({key for each in all_replicas for key in each}):
        logs = [each[key] for each in all_replicas if key in each]
        entry = local[key].entry if key in local else _received(module, key, logs[0])
        values = [one["value"] for one in logs]
        sizes = [one["size"] for one in logs if one["size"] is not None]
        is_sure = all(one["is_sure"] for one in logs)
        total = _Logged(entry, 0.0, sum(sizes), is_sure).weight if len(sizes) == len(logs) else None
        if total:
            value = sum(value * size for value, size in zip(values, sizes, strict=True)) / total
        else:
            value = REDUCTIONS.get(entry.how, statistics.fmean)(values)
        if entry.is_number or key in local:
            value = next(filter(math.isnan, values), value)
            reduced[key] = _Logged(entry, value, sum(sizes) if sizes else None)
    return reduced


def _sent(logged: _Logged, fqns: Mapping[int, str]) -> dict[str, Any]:
    """Return what other replicas need to log the same."""
    entry = logged.entry
    kwargs = {name: value for name, value in entry.kwargs.items() if isinstance(value, str | int | None)}
    if entry.how in ("mean", "sum", "max", "min"):
        kwargs["reduce_fx"] = entry.how
    metric = None if entry.metric is None else fqns.get(id(entry.metric), "")
    sent = {**logged._asdict(), "entry": None, "kwargs": kwargs, "dtype": entry.dtype, "metric": metric}
    return sent if entry.is_number else {**sent, "other": None}


def _received(module: pl.LightningModule, key: Key, sent: Mapping[str, Any]) -> Entry:
    """Make the log entry of another replica, for this one to log.

    Raises:
        RanksDisagree: It is a metric object that is not found here.
    """
    metric = None
    if sent["metric"] is not None:
        if not sent["metric"]:
            raise RanksDisagree(
                f"replicas log different keys, among them {key[0]!r} with a metric object that is no attribute of the"
                " module, so that this replica cannot find its own; make it in __init__, or log it on every rank",
                entry="log-metric",
            )
        metric = cast("Metric", module.get_submodule(sent["metric"]))
    other = {"other": sent["other"]} if "other" in sent else {}
    return Entry(key[0], metric, dict(sent["kwargs"]), [sent["value"]], [None], sent["dtype"], **other)


# Attributes of the module while steps may run.
_CALLS, _SAVES = "_hybrid_logger_calls", "_hybrid_saves"


class _LoggerProxy:
    """Stands for a logger, or its experiment: has the attributes of the real one, and records calls."""

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
def captured_calls(module: pl.LightningModule) -> Iterator[None]:
    """Record the calls of a step that runs inside, to its loggers and of ``trainer.save_checkpoint``.

    With manual optimization, the model changes inside of the step: a checkpoint is written where it asks for one.
    """
    trainer = module.trainer
    keep_clean(type(module))
    with contextlib.ExitStack() as stack:
        if module.automatic_optimization:
            save = partial(_record_save, vars(module).setdefault(_SAVES, []))
            stack.enter_context(replaced(trainer, "save_checkpoint", save, reason="one checkpoint, after the step"))
        loggers = trainer._loggers
        if loggers and not isinstance(vars(loggers[0]).get("_calls"), list):
            proxies = _proxies(loggers, vars(module).setdefault(_CALLS, []))
            stack.enter_context(replaced(trainer, "_loggers", proxies, reason="loggers are told once, after the step"))
        yield


def _proxies(loggers: Sequence[Any], calls: list[Any]) -> list[_LoggerProxy]:
    return [
        _LoggerProxy(lambda logger=logger: logger, calls, str(index), is_logger=True)  # type: ignore[misc]
        for index, logger in enumerate(loggers)
    ]


def _record_save(saves: list[RecordedCall], *args: Any, **kwargs: Any) -> None:
    saves.append(RecordedCall("trainer", "save_checkpoint", dict(enumerate(args)), kwargs))


def _taken(module: pl.LightningModule, attribute: str) -> list[RecordedCall]:
    """The calls that a step recorded: lists that microbatches append to have an entry per batch."""
    calls = vars(module).get(attribute, [])
    recorded = list(calls)
    calls.clear()
    return recorded


def save_checkpoints(module: pl.LightningModule, *, is_stepped: bool = False) -> None:
    """Write the checkpoints that a step asked for; collective.

    Raises:
        BackwardStepError: There is one, and the parameters have been stepped since (``is_stepped``).
    """
    for _, _, args, kwargs in _taken(module, _SAVES):
        if is_stepped:
            raise BackwardStepError(
                "training_step calls trainer.save_checkpoint, and its backward has stepped the parameters before the"
                " checkpoint can be written; save in on_train_batch_end, or set optimizer_in_backward=False",
                entry="save-in-step",
            )
        module.trainer.save_checkpoint(*args.values(), **kwargs)


def flush_logger_calls(module: pl.LightningModule) -> None:
    """Make the calls to loggers that a step recorded."""
    for path, name, args, kwargs in _taken(module, _CALLS):
        index, *attributes = path.split(".")
        target: Any = module.trainer.loggers[int(index)]
        for attribute in attributes:
            target = getattr(target, attribute)
        getattr(target, name)(*args.values(), **kwargs)


def drop_calls(module: pl.LightningModule) -> None:
    """Drop recorded calls after the run."""
    for attribute in (_CALLS, _SAVES):
        vars(module).pop(attribute, None)


def log_full_graph(trainer: Any, module: pl.LightningModule, *, is_empty: bool) -> Callable[[], None]:
    """Let each logger log its graph now, and not when Lightning asks: the module may be sharded then.

    ``is_empty`` says whether the module was built without weights. Returns the undo: a run may fail before it asks.
    """
    undo = contextlib.ExitStack()
    for logger in trainer.loggers:
        if not is_empty:
            logger.log_graph(module)
        elif getattr(logger, "_log_graph", False):
            rank_zero_warn(
                f"{type(logger).__name__}(log_graph=True) runs the full module on one rank, and this one was built"
                " with empty_init=True; no graph is logged: call logger.log_graph(module) after the run"
            )
        undo.callback(_skip_once(logger))
    return undo.close


def _skip_once(logger: Any) -> Callable[[], None]:
    def log_graph(*_: Any, **__: Any) -> None:
        put_back()

    return (put_back := replace(logger, "log_graph", log_graph, reason="the graph is logged already"))
