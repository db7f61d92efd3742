"""The reference in pieces: plain Lightning in one process, which calls the user's step once per replica or microbatch.

This defines the numbers of objectives that mix samples: the mean of the gradients of the pieces, as in gradient
accumulation. Nothing of it is the pipeline's; what steps log and leave on the module is joined here.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.batch.merge import Microbatches, join
from lightning_hybrid.step.batch.metrics import FullBatchMetrics
from lightning_hybrid.step.batch.split import join_batches, sizes_of
from lightning_hybrid.step.objects.tensors import detached_leaf
from lightning_hybrid.step.tracing.metrics import find_sinks
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.verify.one_process.gradients import PieceGradients
from lightning_hybrid.verify.one_process.loaders import ReplicaLoader
from lightning_hybrid.verify.one_process.mixing import Mixing, mixing_of, rounding_of
from lightning_hybrid.verify.one_process.module_state import MicrobatchEffects, ReplicaStates, without_side_effects
from lightning_hybrid.verify.one_process.pieces import DataSplit, Piece, full_piece, joined
from lightning_hybrid.verify.one_process.plain_run import PlainRun
from lightning_hybrid.verify.records.record import RunRecord

# The arguments of ``log`` after the name and the value, by position.
_LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")


@dataclass
class _Logged:
    """One call of ``log`` in a step.

    Attributes:
        what: What the last piece has logged.
        kwargs: Its other arguments.
        values: Of the pieces that have logged it, by position.
        sizes: Their ``batch_size``, where that is passed.
        origin: The call of a metric that has returned the number, if one has.
    """

    what: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    origin: Any = None

    @property
    def how(self) -> str:
        """The name of the reduction: "mean", "sum", "max", "min", or that of the user's function."""
        how = self.kwargs.get("reduce_fx", "mean")
        return how if isinstance(how, str) else getattr(how, "__name__", "")

    def over(self, pieces: Mapping[int, Piece], samples: Sequence[int | None]) -> float:
        """The number over these pieces, by position; NaN if none of them has logged it."""
        values = {position: self.values[position] for position in pieces if position in self.values}
        each = list(values.values())
        if isinstance(self.what, Metric) or self.origin is not None:
            return each[0] if each else math.nan  # that of the batch already
        if isinstance(self.what, Tensor) and not (self.what.is_floating_point() or self.what.is_complex()):
            return sum(each)
        how = self.how if self.how in ("max", "min", "sum") else ""
        if not isinstance(self.what, Tensor):
            counts = [(value, samples[position] or 0) for position, value in values.items()]
            if self.how == "sum" and all(v == n or (n > 1 and v % n == 0) for v, n in counts) and any(each):
                how = "sum"
            elif len(set(each)) == 1:
                how = "max"
        weights = [pieces[position].weight for position in values]
        return _reduced(how, each, weights) if each else math.nan


class PiecesRun(PlainRun):
    """The connection to a Trainer on one device that runs each step once per replica, or per microbatch."""

    _joins_replicas = False

    def __init__(
        self,
        data_split: DataSplit,
        *,
        full_training: bool = False,
        full_evaluation: bool = False,
        precision: str = "64-true",
        **draws: Any,
    ) -> None:
        """Set up the run.

        Args:
            data_split: How the data are split.
            full_training: Whether to train on each replica's batch unsplit.
            full_evaluation: Whether to evaluate on each replica's batch unsplit.
            precision: Lightning's name of the precision of the loss.
            draws: ``keyed`` of a `PlainRun`.
        """
        super().__init__(data_split, **draws)
        self._full_training, self._full_evaluation, self._precision = full_training, full_evaluation, precision
        self._latest_batches: tuple[Any, list[Any]] | None = None
        self._losses: dict[int, list[float]] = {}
        self._observed = RunRecord()  # until the run ends; then the recorder's, to which a resumed step may add

    def connect(self, trainer: Any, module: Any) -> None:
        """Split the loaders, and give each replica its state."""
        super().connect(trainer, module)
        self._replicas = ReplicaStates(module, trainer)

    def finish(self, observed: RunRecord) -> None:
        """Add the losses and buffers of each replica too."""
        super().finish(observed)
        observed.mixing, self._observed = self._observed.mixing, observed
        observed.replica_losses = list(self._losses.values())
        observed.replica_buffers = self._replicas.buffers()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, name: str, batch: Any, *rest: Any) -> Any:
        if name == "training_step":
            return self._training_step(batch, *rest)
        return self._evaluation_step(name, batch, *rest)

    def _training_step(self, batch: Any, *rest: Any) -> Any:
        batches = self._batches(batch, self._trainer.fit_loop._combined_loader, None)
        if not self._module.automatic_optimization:
            return self._plain["training_step"](join_batches(batches), *rest)
        pieces = self._split("training_step", batches)
        samples = max(size or 0 for size in sizes_of([piece.batch for piece in pieces]))
        self._shape = max(self._shape, (len(batches), len(pieces) // len(batches), samples))
        full = math.nan
        if self._observed.mixing is None:
            found = [self._mixing_of(i, batch, pieces, rest) for i, batch in enumerate(batches)]
            self._observed.mixing, full = next((mixing for mixing, _ in found if mixing), None), found[0][1]
        gradients = PieceGradients(self._module)

        def backward(piece: Piece, output: Any) -> Any:
            loss = find_loss(output)
            if loss is not None:
                gradients.backward(loss, piece.weight)
            return torch.utils._pytree.tree_map(detached_leaf, output)

        with gradients:
            outputs = self._run("training_step", pieces, rest, self._number, backward)
        if any(find_loss(output) is None for output in outputs):
            return None
        weighted = [float(find_loss(output)) * piece.weight for output, piece in zip(outputs, pieces, strict=True)]
        losses = [
            sum(loss for loss, piece in zip(weighted, pieces, strict=True) if piece.replica == replica)
            / sum(piece.weight for piece in pieces if piece.replica == replica)
            for replica in range(len(batches))
        ]
        # Callbacks receive the loss of the last closure that an optimizer has called for this batch, divided by the
        # number of accumulated batches.
        self._losses[self._number] = [loss / self._trainer.accumulate_grad_batches for loss in losses]
        if self._observed.mixing is None and abs(full - losses[0]) > rounding_of(self._precision) * abs(full):
            # What one microbatch leaves on the module, such as a count, changes the next one.
            self._observed.mixing = Mixing("loss", full, losses[0], sum(m.replica == 0 for m in pieces), False)
        loss = gradients.loss(find_loss(outputs[0]).new_tensor(sum(weighted)))
        output = _join(outputs, pieces)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _mixing_of(
        self, replica: int, batch: Any, pieces: list[Piece], rest: tuple[Any, ...]
    ) -> tuple[Mixing | None, float]:
        """Whether the step of one replica is the mean of that of its microbatches, and its loss."""
        own = [piece for piece in pieces if piece.replica == replica]
        if len(own) == 1:
            return None, math.nan
        module = self._module
        parameters = [(p, p.detach().clone()) for p in module.parameters() if not is_lazy(p)]

        def step(piece: Piece, then: Callable[[Any], Any]) -> Any:
            with without_side_effects(module), self._as_in_layout(self._number, [piece]), torch.enable_grad():
                result = then(find_loss(self._plain["training_step"](piece.batch, *rest)))
            for parameter, before in parameters:
                parameter.data.copy_(before)  # a step may write, as a momentum teacher does
            return result

        mixing, full = mixing_of(module, step, full_piece(own, batch), own, self._precision)
        if mixing is not None and self._randomness.has_undivided_draws:
            mixing = replace(mixing, is_weighted=False)  # the full batch has the draws of one microbatch
        return mixing, full

    def _evaluation_step(self, name: str, batch: Any, *rest: Any) -> Any:
        trainer = self._trainer
        fitting = trainer.fit_loop.epoch_loop.val_loop
        loop = {"test_step": trainer.test_loop, "predict_step": trainer.predict_loop}.get(name, fitting)
        index = rest[1] if len(rest) > 1 else 0
        batches = self._batches(batch, loop._combined_loader, index)
        pieces = self._split(name, batches)
        self._evaluated += 1
        outputs = self._run(name, pieces, rest, -1 - self._evaluated, lambda _, output: output)
        if name != "predict_step":
            return _join(outputs, pieces)
        for replica in range(len(batches)):
            own = [i for i, piece in enumerate(pieces) if piece.replica == replica]
            predicted = _join([outputs[i] for i in own], [pieces[i] for i in own])
            self._predicted[replica].setdefault(index, []).append(predicted)
        return self._predicted[0][index][-1]

    def _run(
        self, name: str, pieces: list[Piece], rest: tuple[Any, ...], number: int, after: Callable[[Piece, Any], Any]
    ) -> list[Any]:
        """Run the user's step on each piece, and log its reduced values once."""
        module, outputs = self._module, []
        logged: dict[tuple[str, int], _Logged] = {}
        sizes = sizes_of([piece.batch for piece in pieces])
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric._forward_cache = None
        self._replicas.before_step(pieces[-1].replica)
        self._replicas.share_buffers(name)
        for replica in sorted({piece.replica for piece in pieces}):
            own = {i: piece for i, piece in enumerate(pieces) if piece.replica == replica}
            self._replicas.enter(replica)
            in_shares = self._data_split.has_left_stages(self._number) and name == "training_step"
            effects = MicrobatchEffects(module, self._data_split.shares if in_shares else 1)
            metrics = FullBatchMetrics(find_sinks(module))
            metrics.begin()
            for position, piece in own.items():
                effects.before_microbatch(piece.share)
                once = metrics.microbatch(position, is_full=len(own) == 1)
                with self._as_in_layout(number, [piece]), self._captured(logged, position, metrics), once:
                    outputs.append(after(piece, self._plain[name](piece.batch, *rest)))
                effects.after_microbatch()
            if len(own) > 1:
                effects.finish([piece.weight for piece in own.values()], [sizes[position] for position in own])
            total = sum(piece.weight for piece in own.values())
            weights = [own[i].weight / total if i in own else 0.0 for i in range(len(pieces))]
            metrics.finish_all(Microbatches(weights, sizes))
            value_of = metrics.values()
            metrics.close()
            for each in logged.values():
                value = value_of(each.what if isinstance(each.what, Metric) else None, each.origin)
                if value is not None:
                    each.values.update(dict.fromkeys(own, value))
        self._replicas.after_step()
        self._log(logged, pieces, sizes)
        return outputs

    @contextlib.contextmanager
    def _captured(
        self, logged: dict[tuple[str, int], _Logged], position: int, metrics: FullBatchMetrics
    ) -> Iterator[None]:
        """Context of a piece whose calls of ``log`` are kept, by name and how often the step has logged it before."""
        times: Counter[str] = Counter()

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs.update(zip(_LOG_ARGUMENTS, args, strict=False))
            each = logged.setdefault((name, times[name]), _Logged())
            times[name] += 1
            each.what, each.kwargs, each.origin = value, kwargs, metrics.origin(value)
            number: Any = getattr(value, "_forward_cache", None) if isinstance(value, Metric) else value
            if number is not None and not math.isnan(number):
                each.values[position] = float(number)
            if kwargs.get("batch_size") is not None:
                each.sizes[position] = kwargs["batch_size"]

        with replaced(self._module, "log", log, reason="the reference in pieces"):
            yield

    def _log(self, logged: Mapping[tuple[str, int], _Logged], pieces: list[Piece], sizes: Sequence[int | None]) -> None:
        """Log each number once: over the pieces of each replica, then over the replicas that have logged it."""
        by_replica: dict[int, dict[int, Piece]] = {}
        for position, piece in enumerate(pieces):
            by_replica.setdefault(piece.replica, {})[position] = piece
        for (name, _), each in logged.items():
            values = [(each.over(own, sizes), sum(p.weight for p in own.values())) for own in by_replica.values()]
            values = [(value, weight) for value, weight in values if value == value]
            value = _reduced(each.how, *map(list, zip(*values, strict=True))) if values else math.nan
            kwargs = dict(each.kwargs)
            if each.sizes:
                kwargs["batch_size"] = sum(each.sizes.values())
            elif None not in sizes:
                kwargs["batch_size"] = sum(size or 0 for size in sizes)
            if isinstance(each.what, Metric):
                each.what._forward_cache = None if value != value else torch.tensor(value)  # type: ignore[assignment]
                self._module.log(name, each.what, **kwargs)
            else:
                default = torch.get_default_dtype()
                dtype = torch.promote_types(each.what.dtype, default) if isinstance(each.what, Tensor) else default
                self._module.log(name, torch.tensor(value, dtype=dtype), **kwargs)

    # -- batches ------------------------------------------------------------------------------------------------------

    def _batches(self, batch: Any, combined: Any, loader: int | None) -> list[Any]:
        """The batches of all replicas in this step; a closure that is called again gets the same."""
        if self._data_split.replicas == 1:
            return [batch]
        if self._latest_batches is not None and self._latest_batches[0] is batch:
            return self._latest_batches[1]
        sources: list[ReplicaLoader] = combined.flattened if loader is None else [combined.flattened[loader]]
        rows = [
            source.pending.popleft() if source.pending else [None] * self._data_split.replicas for source in sources
        ]
        others = []
        for replica in range(1, self._data_split.replicas):
            drawn = [row[replica] for row in rows]
            if loader is None:
                other = torch.utils._pytree.tree_unflatten(drawn, combined._spec)
            elif drawn[0] is None:
                continue
            else:
                [other] = drawn
            others.append(self._transferred(other, loader or 0))
        self._latest_batches = batch, [batch, *others]
        return self._latest_batches[1]

    def _transferred(self, batch: Any, loader: int) -> Any:
        batch = self._strategy.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=loader)
        return self._strategy.batch_to_device(batch, dataloader_idx=loader)

    def _split(self, name: str, batches: list[Any]) -> list[Piece]:
        pieces = self._pieces.of(name, batches, self._number)
        is_whole = self._full_training if name == "training_step" else self._full_evaluation
        return joined(pieces, batches) if is_whole else pieces


def _reduced(how: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """The sum, the largest, the smallest or the weighted mean of values."""
    plain: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}
    if how in plain:
        return float(plain[how](values))
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _join(outputs: list[Any], pieces: list[Piece]) -> Any:
    return join(outputs, [piece.weight for piece in pieces], sizes_of([piece.batch for piece in pieces]))
