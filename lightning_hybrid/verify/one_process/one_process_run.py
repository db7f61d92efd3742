"""The reference run: plain Lightning in one process, which calls the user's step once per microbatch.

This defines the numbers of every layout: the batches of all replicas, each in its microbatches, and the mean of their
gradients. It uses no pipeline code; microbatches are accumulated like batches in gradient accumulation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.results.log_entry import Entry
from lightning_hybrid.pipeline.results.prepare_step_outputs_for_hooks import detached
from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.batch.split_batch_into_microbatches import (
    join_batches,
    sizes_of,
)
from lightning_hybrid.step.batch_means.full_batch_metrics import FullBatchMetrics
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss
from lightning_hybrid.step.tracing.torchmetrics_as_graph_nodes import find_sinks
from lightning_hybrid.verify.one_process.batch_norm_per_microbatch import batch_norm_per_microbatch
from lightning_hybrid.verify.one_process.defer_gradients_until_backward import DeferredGradients
from lightning_hybrid.verify.one_process.merge_side_effects_of_microbatches import MicrobatchSideEffects
from lightning_hybrid.verify.one_process.mixing import Mixing, mixing_of, rounding_of
from lightning_hybrid.verify.one_process.pieces import DataSplit, Piece, joined, known_sizes
from lightning_hybrid.verify.one_process.plain_run import PlainRun
from lightning_hybrid.verify.one_process.replica_loader import ReplicaLoader
from lightning_hybrid.verify.one_process.replica_modules_and_state_copying import ReplicaModules
from lightning_hybrid.verify.one_process.undo_side_effects import without_side_effects
from lightning_hybrid.verify.records.run_record_and_recorder import RunRecord, local_copies


class OneProcessRun(PlainRun):
    """The connection to a Trainer on one device that runs each step once per microbatch."""

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
            draws: ``keyed`` and ``reseed`` of a `PlainRun`.
        """
        super().__init__(data_split, **draws)
        self._full_training, self._full_evaluation, self._precision = full_training, full_evaluation, precision
        self._latest_batches: tuple[Any, list[Any]] | None = None
        self._losses: dict[int, list[float]] = {}
        self._observed = RunRecord()  # until the run ends; then the recorder's, to which a resumed step may add

    def connect(self, trainer: Any, module: Any) -> None:
        """Split the loaders, and give each replica its module."""
        super().connect(trainer, module)
        self._replicas = ReplicaModules(module, trainer)

    def finish(self, observed: RunRecord) -> None:
        """Add the losses and buffers of each replica too."""
        super().finish(observed)
        observed.mixing, self._observed = self._observed.mixing, observed
        observed.replica_losses = list(self._losses.values())
        if len(self._replicas.modules) > 1:
            self._replicas.before_step()
            observed.replica_buffers = [local_copies(module.named_buffers()) for module in self._replicas.modules]

    def _module_of(self, replica: int) -> Any:
        return self._replicas[replica]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, name: str, batch: Any, *rest: Any) -> Any:
        if name == "training_step":
            return self._training_step(batch, *rest)
        return self._evaluation_step(name, batch, *rest)

    def _training_step(self, batch: Any, *rest: Any) -> Any:
        module = self._module
        batches = self._batches(batch, self._trainer.fit_loop._combined_loader, None)
        if not module.automatic_optimization:
            return self._plain["training_step"](join_batches(batches), *rest)
        microbatches = self._split_batches("training_step", batches)
        samples = max(size or 0 for size in sizes_of([m.batch for m in microbatches]))
        self._shape = max(self._shape, (len(batches), len(microbatches) // len(batches), samples))
        if len(microbatches) == 1 and not self._keyed:
            with self._state(0, microbatches[0]), batch_norm_per_microbatch(module, [microbatches[0].sizes]):
                output = self._plain["training_step"](batch, *rest)
            loss = find_loss(output)
            self._record_losses([] if loss is None else [float(loss)])
            return output
        full = math.nan
        if self._observed.mixing is None:
            found = [self._mixing_of(i, batch, microbatches, rest) for i, batch in enumerate(batches)]
            self._observed.mixing, full = next((mixing for mixing, _ in found if mixing), None), found[0][1]
        gradients = DeferredGradients(module)

        def backward(microbatch: Piece, output: Any) -> Any:
            loss = find_loss(output)
            if loss is not None:
                gradients.backward(loss, microbatch.weight)
            return torch.utils._pytree.tree_map(detached, output)

        with gradients:
            outputs = self._run("training_step", batches, microbatches, rest, self._number, backward)
        if any(find_loss(output) is None for output in outputs):
            return None
        weighted = [float(find_loss(output)) * m.weight for output, m in zip(outputs, microbatches, strict=True)]
        losses = [
            sum(loss for loss, m in zip(weighted, microbatches, strict=True) if m.replica == replica)
            / sum(m.weight for m in microbatches if m.replica == replica)
            for replica in range(len(batches))
        ]
        self._record_losses(losses)
        if self._observed.mixing is None and abs(full - losses[0]) > rounding_of(self._precision) * abs(full):
            # What one microbatch leaves on the module, such as a count, changes the next one.
            self._observed.mixing = Mixing("loss", full, losses[0], sum(m.replica == 0 for m in microbatches), False)
        loss = gradients.loss(find_loss(outputs[0]).new_tensor(sum(weighted)))
        joined = _join(outputs, microbatches)
        return {**joined, "loss": loss} if isinstance(joined, Mapping) else loss

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
            statistics, state = batch_norm_per_microbatch(module, [piece.sizes]), self._state(self._number, piece)
            with without_side_effects(module), state, statistics, torch.enable_grad():
                result = then(find_loss(self._plain["training_step"](piece.batch, *rest)))
            for parameter, before in parameters:
                parameter.data.copy_(before)  # a step may write, as a momentum teacher does
            return result

        sizes, numbers = known_sizes([piece.batch for piece in own]), tuple(piece.number for piece in own)
        full_batch = Piece(replica, replica, batch, 1.0, sizes=sizes, numbers=numbers if sizes else ())
        mixing, full = mixing_of(module, step, full_batch, own, self._precision)
        if mixing is not None and self._randomness.has_undivided_draws:
            mixing = replace(mixing, is_weighted=False)  # the full batch has the draws of one microbatch
        return mixing, full

    def _record_losses(self, losses: list[float]) -> None:
        # Callbacks receive the loss of the last closure that an optimizer has called for this batch, divided by the
        # number of accumulated batches.
        self._losses[self._number] = [loss / self._trainer.accumulate_grad_batches for loss in losses]

    def _evaluation_step(self, name: str, batch: Any, *rest: Any) -> Any:
        trainer = self._trainer
        fitting = trainer.fit_loop.epoch_loop.val_loop
        loop = {"test_step": trainer.test_loop, "predict_step": trainer.predict_loop}.get(name, fitting)
        index = rest[1] if len(rest) > 1 else 0
        batches = self._batches(batch, loop._combined_loader, index)
        microbatches = self._split_batches(name, batches)
        self._evaluated += 1
        if len(microbatches) == 1 and not self._keyed:
            with self._state(0, microbatches[0]):
                outputs = [self._plain[name](batch, *rest)]
        else:
            outputs = self._run(name, batches, microbatches, rest, -1 - self._evaluated, lambda _, output: output)
        if name != "predict_step":
            return _join(outputs, microbatches)
        for replica in range(len(batches)):
            positions = [i for i, m in enumerate(microbatches) if m.replica == replica]
            predicted = _join([outputs[i] for i in positions], [microbatches[i] for i in positions])
            self._predicted[replica].setdefault(index, []).append(predicted)
        return self._predicted[0][index][-1]

    def _run(
        self,
        name: str,
        batches: list[Any],
        microbatches: list[Piece],
        rest: tuple[Any, ...],
        number: int,
        after: Callable[[Piece, Any], Any],
    ) -> list[Any]:
        """Run the user's step on each microbatch, and log its reduced values once."""
        logs = LogCapture(len(microbatches))
        outputs = []
        called: list[
            tuple[list[int], Callable[[Metric | None, Any], float | None]]
        ] = []  # values of metrics, by replica
        for metric in (m for m in self._module.modules() if isinstance(m, Metric)):
            metric._forward_cache = None
        self._replicas.before_step(microbatches[-1].replica)
        self._replicas.share_buffers(name)
        for replica in range(len(batches)):
            of_replica = [(i, m) for i, m in enumerate(microbatches) if m.replica == replica]
            if not of_replica:
                continue
            module = self._replicas.begin_replica(replica)
            in_shares = self._data_split.has_left_stages(self._number) and name == "training_step"
            num_shares = self._data_split.shares if in_shares else 1
            effects = MicrobatchSideEffects(module, num_shares) if len(of_replica) > 1 else None
            metrics, share = FullBatchMetrics(find_sinks(module)), sum(m.weight for _, m in of_replica)
            metrics.begin()
            for position, microbatch in of_replica:
                if effects is not None:
                    effects.before_microbatch(microbatch.share)
                once = metrics.microbatch(position, is_full=len(of_replica) == 1)
                logged = logs.microbatch(module, position, metrics.origin)
                random_state, strategy_module = self._state(number, microbatch), self._as_strategy_module(module)
                statistics = batch_norm_per_microbatch(module, [microbatch.sizes])
                with random_state, logged, strategy_module, once, statistics:
                    outputs.append(after(microbatch, self._plain[name](microbatch.batch, *rest)))
                if effects is not None:
                    effects.after_microbatch()
            if effects is not None:
                effects.finish([m.weight for _, m in of_replica], sizes_of([m.batch for _, m in of_replica]))
            positions = [position for position, _ in of_replica]
            weights, each = [0.0] * len(microbatches), sizes_of([m.batch for m in microbatches])
            for position, microbatch in of_replica:
                weights[position] = microbatch.weight / share
            metrics.finish_all(weights, each)
            called.append((positions, metrics.values()))
            metrics.close()
        self._replicas.after_step()
        entries = logs.entries()
        for entry in entries:
            for positions, value_of in called:
                if (value := value_of(entry.metric, entry.origin)) is not None:
                    for position in positions:
                        entry.values[position] = value
        self._log(entries, microbatches)
        return outputs

    def _log(self, entries: list[Entry], microbatches: list[Piece]) -> None:
        module = self._module
        sizes = sizes_of([m.batch for m in microbatches])
        replicas = sorted({m.replica for m in microbatches})
        shares = [sum(m.weight for m in microbatches if m.replica == replica) for replica in replicas]
        for entry in entries:
            each = [
                entry.with_values(
                    [entry.values[i] for i, m in enumerate(microbatches) if m.replica == replica], []
                ).combine(
                    [m.weight / share for m in microbatches if m.replica == replica],
                    [size for size, m in zip(sizes, microbatches, strict=True) if m.replica == replica],
                )
                for replica, share in zip(replicas, shares, strict=True)
            ]
            logged = [(value, share) for value, share in zip(each, shares, strict=True) if value == value]
            total = sum(share for _, share in logged)
            value = each[0]
            if logged:
                value = _over_replicas(entry.how, [v for v, _ in logged], [s / total for _, s in logged])
            arguments = entry.total_kwargs()
            if "batch_size" not in arguments and None not in sizes:
                arguments = {**arguments, "batch_size": sum(size or 0 for size in sizes)}
            if entry.metric is None:
                module.log(entry.name, torch.tensor(value, dtype=entry.dtype), **arguments)
            else:
                entry.metric._forward_cache = None if value != value else torch.tensor(value)  # type: ignore[assignment]
                module.log(entry.name, entry.metric, **arguments)

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

    def _split_batches(self, name: str, batches: list[Any]) -> list[Piece]:
        pieces = self._pieces.of(name, batches, self._number)
        is_whole = self._full_training if name == "training_step" else self._full_evaluation
        return joined(pieces, batches) if is_whole else pieces

    def _state(self, number: int, piece: Piece) -> AbstractContextManager[None]:
        return self._random_state(number, piece, piece.numbers, piece.sizes)

    # -- replicas -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _as_strategy_module(self, module: Any) -> Iterator[None]:
        strategy = self._strategy
        before = strategy._lightning_module, strategy._model
        strategy._lightning_module = strategy._model = module
        try:
            yield
        finally:
            strategy._lightning_module, strategy._model = before


def _over_replicas(how: str, values: list[float], shares: list[float]) -> float:
    if how in ("max", "min"):
        return max(values) if how == "max" else min(values)
    return sum(values) if how == "sum" else sum(v * share for v, share in zip(values, shares, strict=True))


def _join(outputs: list[Any], microbatches: list[Piece]) -> Any:
    return join(outputs, [m.weight for m in microbatches], sizes_of([m.batch for m in microbatches]))
