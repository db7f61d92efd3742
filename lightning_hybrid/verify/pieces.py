"""The reference in pieces: plain Lightning in one process, which calls the user's step once per replica or microbatch.

This defines the numbers of objectives that mix samples: the mean of the gradients of the pieces, as in gradient
accumulation. Nothing of it is the pipeline's; what steps log is joined here, and lists on the module have an entry per
piece.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_hybrid.batch.merge import Microbatches, join
from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.batch.split import join_batches, sizes_of
from lightning_hybrid.patching import replaced
from lightning_hybrid.step.objects.tensors import detached_leaf
from lightning_hybrid.step.tracing.metrics import find_sinks
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.verify.data import DataSplit, Piece, joined
from lightning_hybrid.verify.plain import PlainRun
from lightning_hybrid.verify.record import RunRecord
from lightning_hybrid.verify.state import ReplicaStates, ShareStates, without_side_effects
from lightning_hybrid.verify.steps import Mixing, PieceGradients, mixing_of, rounding_of

# The arguments of ``log`` after the name and the value, by position.
_LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}


@dataclass
class _LogCall:
    """One call of ``log`` in a step."""

    what: Any = None  # what the last piece has logged
    kwargs: dict[str, Any] = field(default_factory=dict)  # its other arguments
    values: dict[int, float] = field(default_factory=dict)  # of the pieces that have logged it, by position
    sizes: dict[int, int] = field(default_factory=dict)  # their ``batch_size``, where that is passed
    origin: Any = None  # the call of a metric that has returned the number, if one has

    @property
    def how(self) -> str:
        """The name of the reduction: "mean", "sum", "max", "min", or the name of the user's function."""
        how = self.kwargs.get("reduce_fx", "mean")
        return how if isinstance(how, str) else getattr(how, "__name__", "")

    def over(self, pieces: Mapping[int, Piece]) -> float:
        """The number over these pieces, by position; NaN if none of them has logged it."""
        values = {position: self.values[position] for position in pieces if position in self.values}
        each = list(values.values())
        if not each or isinstance(self.what, Metric) or self.origin is not None:
            return each[0] if each else math.nan  # that of the batch already
        how = self.how
        if isinstance(self.what, Tensor):
            is_whole = not (self.what.is_floating_point() or self.what.is_complex())
            how = "sum" if is_whole else how
        else:
            how = "max" if len(set(each)) == 1 and how != "sum" else how
        return _reduced(how, each, [pieces[position].weight for position in values])

    def log(self, module: Any, name: str, replicas: Sequence[Mapping[int, Piece]], sizes: Sequence[int | None]) -> None:
        """Log the number once: over the pieces of each replica, then over the replicas that have logged it."""
        values = [(self.over(own), sum(p.weight for p in own.values())) for own in replicas]
        values = [(value, weight) for value, weight in values if value == value]
        value = _reduced(self.how, *map(list, zip(*values, strict=True))) if values else math.nan
        kwargs = dict(self.kwargs)
        if self.sizes:
            kwargs["batch_size"] = sum(self.sizes.values())
        elif None not in sizes:
            kwargs["batch_size"] = sum(size or 0 for size in sizes)
        if isinstance(self.what, Metric):
            self.what._forward_cache = None if value != value else torch.tensor(value)  # type: ignore[assignment]
            module.log(name, self.what, **kwargs)
        else:
            default = torch.get_default_dtype()
            dtype = torch.promote_types(self.what.dtype, default) if isinstance(self.what, Tensor) else default
            module.log(name, torch.tensor(value, dtype=dtype), **kwargs)


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
        """Set up the run; ``full_training`` and ``full_evaluation`` take each replica's batch unsplit."""
        super().__init__(data_split, **draws)
        self._full_training, self._full_evaluation, self._precision = full_training, full_evaluation, precision
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

    def _drawn(self, name: str, batch: Any, loader: int | None) -> list[Any]:
        """The batch of the first replica, which Lightning has transferred, and the batches of the others."""
        _, *others = super()._drawn(name, batch, loader)
        converted = []
        for other in others:
            other = self._strategy.precision_plugin.convert_input(other)
            other = self._module._on_before_batch_transfer(other, dataloader_idx=loader or 0)
            converted.append(self._strategy.batch_to_device(other, dataloader_idx=loader or 0))
        return [batch, *converted]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, name: str, batches: list[Any], pieces: list[Piece], number: int, batch: Any, *rest: Any) -> Any:
        if name == "training_step" and not self._module.automatic_optimization:
            return self._plain["training_step"](join_batches(batches), *rest)
        if self._full_training if name == "training_step" else self._full_evaluation:
            pieces = joined(pieces, batches)
        if name == "training_step":
            return self._training_step(batches, pieces, *rest)
        outputs = self._run(name, pieces, rest, number, lambda _, output: output)
        if name != "predict_step":
            return _join(outputs, pieces)
        owners = range(len(batches))
        own = [[i for i, piece in enumerate(pieces) if piece.replica == replica] for replica in owners]
        return self._kept([_join([outputs[i] for i in each], [pieces[i] for i in each]) for each in own], rest)

    def _training_step(self, batches: list[Any], pieces: list[Piece], *rest: Any) -> Any:
        full = math.nan
        if self._observed.mixing is None:
            found = [self._mixing_of(own, pieces, rest) for own in joined(pieces, batches)]
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

    def _mixing_of(self, batch: Piece, pieces: list[Piece], rest: tuple[Any, ...]) -> tuple[Mixing | None, float]:
        """Whether the step of one replica is not the mean over its microbatches, and its loss."""
        module, own = self._module, [piece for piece in pieces if piece.replica == batch.replica]
        if len(own) == 1:
            return None, math.nan
        parameters = [(p, p.detach().clone()) for p in module.parameters() if not is_lazy(p)]

        def step(piece: Piece, then: Callable[[Any], Any]) -> Any:
            with without_side_effects(module), self._as_in_layout(self._number, [piece]), torch.enable_grad():
                result = then(find_loss(self._plain["training_step"](piece.batch, *rest)))
            for parameter, before in parameters:
                parameter.data.copy_(before)  # a step may write, as a momentum teacher does
            return result

        return mixing_of(module, step, batch, own, self._precision, self._randomness)

    def _run(
        self, name: str, pieces: list[Piece], rest: tuple[Any, ...], number: int, after: Callable[[Piece, Any], Any]
    ) -> list[Any]:
        """Run the user's step on each piece, and log its reduced values once."""
        module, outputs = self._module, []
        logged: dict[tuple[str, int], _LogCall] = {}
        sizes = sizes_of([piece.batch for piece in pieces])
        by_replica: dict[int, dict[int, Piece]] = {}
        for position, piece in enumerate(pieces):
            by_replica.setdefault(piece.replica, {})[position] = piece
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric._forward_cache = None
        self._replicas.before_step(pieces[-1].replica)
        self._replicas.share_buffers(name)
        for replica, own in by_replica.items():
            self._replicas.enter(replica)
            shares = self._data_split.shares_of(self._number) if name == "training_step" else 1
            states, metrics = ShareStates(module, shares), FullBatchMetrics(find_sinks(module))
            metrics.begin()
            for position, piece in own.items():
                states.enter(piece.share)
                once = metrics.microbatch(position, is_full=len(own) == 1)
                with self._as_in_layout(number, [piece]), self._captured(logged, position, metrics), once:
                    outputs.append(after(piece, self._plain[name](piece.batch, *rest)))
            states.finish()
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
        for (key, _), each in logged.items():
            each.log(module, key, list(by_replica.values()), sizes)
        return outputs

    @contextlib.contextmanager
    def _captured(
        self, logged: dict[tuple[str, int], _LogCall], position: int, metrics: FullBatchMetrics
    ) -> Iterator[None]:
        """Context of a piece whose calls of ``log`` are kept, by name and how often the step has logged it before."""
        times: Counter[str] = Counter()

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs.update(zip(_LOG_ARGUMENTS, args, strict=False))
            each = logged.setdefault((name, times[name]), _LogCall())
            times[name] += 1
            each.what, each.kwargs, each.origin = value, kwargs, metrics.origin(value)
            number: Any = getattr(value, "_forward_cache", None) if isinstance(value, Metric) else value
            if number is not None and not math.isnan(number):
                each.values[position] = float(number)
            if kwargs.get("batch_size") is not None:
                each.sizes[position] = kwargs["batch_size"]

        with replaced(self._module, "log", log, reason="the reference in pieces"):
            yield


def _reduced(how: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """The sum, the largest, the smallest or the weighted mean of values."""
    if how in _REDUCTIONS:
        return float(_REDUCTIONS[how](values))
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _join(outputs: list[Any], pieces: list[Piece]) -> Any:
    return join(outputs, [piece.weight for piece in pieces], sizes_of([piece.batch for piece in pieces]))
