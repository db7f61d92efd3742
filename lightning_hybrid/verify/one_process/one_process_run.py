"""The reference run: plain Lightning in one process, which calls the user's step once per microbatch.

This defines the numbers of every layout: the batches of all replicas, each in its microbatches, and the mean of their
gradients. It uses no pipeline code; microbatches are accumulated like batches in gradient accumulation.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.results.log_entry import Entry
from lightning_hybrid.pipeline.results.prepare_step_outputs_for_hooks import detached
from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.batch.split_batch_into_microbatches import (
    join_batches,
    sizes_of,
)
from lightning_hybrid.step.batch_means.full_batch_metrics import FullBatchMetrics
from lightning_hybrid.step.instrument.instrument_step import draw_as_stages
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss
from lightning_hybrid.step.tracing.torchmetrics_as_graph_nodes import find_sinks
from lightning_hybrid.verify.one_process.batch_norm_per_microbatch import batch_norm_per_microbatch
from lightning_hybrid.verify.one_process.defer_gradients_until_backward import DeferredGradients
from lightning_hybrid.verify.one_process.logged_numbers import record_logged_numbers
from lightning_hybrid.verify.one_process.merge_side_effects_of_microbatches import MicrobatchSideEffects
from lightning_hybrid.verify.one_process.mixing import Mixing, mixing_of, rounding_of
from lightning_hybrid.verify.one_process.pieces import EVALUATIONS, DataSplit, Piece, Pieces, joined, known_sizes
from lightning_hybrid.verify.one_process.replica_loader import ReplicaLoader, split_loader
from lightning_hybrid.verify.one_process.replica_modules_and_state_copying import ReplicaModules
from lightning_hybrid.verify.one_process.undo_side_effects import without_side_effects
from lightning_hybrid.verify.records.run_record_and_recorder import RunRecord, local_copies, prediction_leaves


class OneProcessRun:
    """The connection to a Trainer on one device that runs each step once per microbatch.

    Attributes:
        devices: Number of processes.
        moved_generators: Whether a step that was not keyed drew from a generator of the process.
    """

    devices = 1

    def __init__(
        self,
        data_split: DataSplit,
        *,
        keyed: bool = False,
        reseed: int | None = None,
        full_training: bool = False,
        full_evaluation: bool = False,
        precision: str = "64-true",
    ) -> None:
        """Set up the run.

        Args:
            data_split: How the data are split.
            keyed: Whether to draw random numbers as the strategies do: keyed by step, microbatch and module.
            reseed: Seed of the random numbers inside steps, if not that of the run.
            full_training: Whether to train on each replica's batch unsplit.
            full_evaluation: Whether to evaluate on each replica's batch unsplit.
            precision: Lightning's name of the precision of the loss.
        """
        self.moved_generators = False
        self._data_split, self._keyed, self._reseed = data_split, keyed, reseed
        self._pieces, self._precision = Pieces(data_split), precision
        self._full_training, self._full_evaluation = full_training, full_evaluation
        self._latest_batches: tuple[Any, list[Any]] | None = None
        self._losses: dict[int, list[float]] = {}
        self._predicted: list[dict[int, list[Any]]] = [{} for _ in range(data_split.replicas)]
        self._evaluated = 0
        self._randomness: Any = None
        self._numbers: set[str] = set()
        self._batch = (0, 0, 0)
        self._observed = RunRecord()  # until the run ends; then the recorder's, to which a resumed step may add

    # -- the protocol of `run_once` -----------------------------------------------------------------------------------

    def strategy(self, pl: ModuleType) -> Any:
        """Make Lightning's strategy for one device, with its steps replaced on this instance."""
        strategy = importlib.import_module(f"{pl.__name__}.strategies").SingleDeviceStrategy(device="cpu")
        self._strategy: Any = strategy
        self._plain = {name: getattr(strategy, name) for name in ("training_step", *EVALUATIONS)}
        strategy.training_step = partial(self._logging, self._training_step)
        for name in EVALUATIONS:
            setattr(strategy, name, partial(self._logging, partial(self._evaluation_step, name)))
        return strategy

    def _logging(self, step: Callable[..., Any], *args: Any) -> Any:
        with record_logged_numbers(self._module, self._numbers):
            return step(*args)

    def connect(self, trainer: Any, module: Any) -> None:
        """Split the loaders over several replicas."""
        self._trainer, self._replicas = trainer, ReplicaModules(module, trainer)
        if self._randomness is None:  # a run that goes on from a checkpoint goes on with its seed
            seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
            self._randomness = KeyedRandomness(seed, torch.device("cpu"))
        connector, replicas = trainer._data_connector, self._data_split.replicas
        if replicas > 1:
            connector._prepare_dataloader = lambda dataloader, shuffle, mode: split_loader(
                trainer, dataloader, replicas, shuffle=shuffle, mode=mode
            )

    def finish(self, observed: RunRecord) -> None:
        """Add the losses, predictions and buffers of each replica."""
        observed.step_numbers = self._numbers
        observed.batch, observed.mixing, self._observed = self._batch, self._observed.mixing, observed
        observed.replica_losses = list(self._losses.values())
        observed.replica_predictions = [prediction_leaves(list(loaders.values())) for loaders in self._predicted]
        if len(self._replicas.modules) > 1:
            self._replicas.before_step()
            observed.replica_buffers = [local_copies(module.named_buffers()) for module in self._replicas.modules]

    @property
    def _latest(self) -> int:
        """Number of the latest training batch."""
        return int(self._trainer.fit_loop.epoch_loop.total_batch_idx)

    @property
    def _module(self) -> Any:
        return self._replicas.modules[0]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _training_step(self, batch: Any, *rest: Any) -> Any:
        module = self._module
        batches = self._batches(batch, self._trainer.fit_loop._combined_loader, None)
        if not module.automatic_optimization:
            return self._plain["training_step"](join_batches(batches), *rest)
        microbatches = self._split_batches("training_step", batches)
        samples = max(size or 0 for size in sizes_of([m.batch for m in microbatches]))
        self._batch = max(self._batch, (len(batches), len(microbatches) // len(batches), samples))
        if len(microbatches) == 1 and not self._keyed:
            with self._random_state(0, microbatches[0]), batch_norm_per_microbatch(module, [microbatches[0].sizes]):
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
            outputs = self._run("training_step", batches, microbatches, rest, self._latest, backward)
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
            statistics, random_state = batch_norm_per_microbatch(module, [piece.sizes]), self._random_state
            with without_side_effects(module), random_state(self._latest, piece), statistics, torch.enable_grad():
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
        self._losses[self._latest] = [loss / self._trainer.accumulate_grad_batches for loss in losses]

    def _evaluation_step(self, name: str, batch: Any, *rest: Any) -> Any:
        trainer = self._trainer
        fitting = trainer.fit_loop.epoch_loop.val_loop
        loop = {"test_step": trainer.test_loop, "predict_step": trainer.predict_loop}.get(name, fitting)
        index = rest[1] if len(rest) > 1 else 0
        batches = self._batches(batch, loop._combined_loader, index)
        microbatches = self._split_batches(name, batches)
        self._evaluated += 1
        if len(microbatches) == 1 and not self._keyed:
            with self._random_state(0, microbatches[0]):
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
            in_shares = self._data_split.has_left_stages(self._latest) and name == "training_step"
            num_shares = self._data_split.shares if in_shares else 1
            effects = MicrobatchSideEffects(module, num_shares) if len(of_replica) > 1 else None
            metrics, share = FullBatchMetrics(find_sinks(module)), sum(m.weight for _, m in of_replica)
            metrics.begin()
            for position, microbatch in of_replica:
                if effects is not None:
                    effects.before_microbatch(microbatch.share)
                once = metrics.microbatch(position, is_full=len(of_replica) == 1)
                logged = logs.microbatch(module, position, metrics.origin)
                random_state, strategy_module = self._random_state(number, microbatch), self._as_strategy_module(module)
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
        pieces = self._pieces.of(name, batches, self._latest)
        is_whole = self._full_training if name == "training_step" else self._full_evaluation
        return joined(pieces, batches) if is_whole else pieces

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

    @contextlib.contextmanager
    def _random_state(self, number: int, microbatch: Piece) -> Iterator[None]:
        """Isolate the generators: outside of steps they continue as if nothing had been drawn inside."""
        with self._randomness.isolated():
            if not self._keyed:
                if self._reseed is not None:
                    with self._randomness.microbatch(self._reseed, number):
                        pass
                before = GeneratorStates(self._randomness.device)
                yield
                self.moved_generators |= not before.are_unchanged()
                return
            module, randomness = self._replicas[microbatch.replica], self._randomness
            with (
                draw_as_stages(module, randomness, number, microbatch.number),
                randomness.rows_of_microbatches(number, microbatch.numbers, microbatch.sizes),
            ):
                yield


def _over_replicas(how: str, values: list[float], shares: list[float]) -> float:
    if how in ("max", "min"):
        return max(values) if how == "max" else min(values)
    return sum(values) if how == "sum" else sum(v * share for v, share in zip(values, shares, strict=True))


def _join(outputs: list[Any], microbatches: list[Piece]) -> Any:
    return join(outputs, [m.weight for m in microbatches], sizes_of([m.batch for m in microbatches]))
