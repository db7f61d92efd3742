"""The reference: the plain Trainer in one process, whose steps receive the batches of all replicas, joined to one.

Lightning runs the user's step, backward and hooks; nothing is split. Two things follow the layout, which says so:
random numbers are keyed by the microbatch that a row belongs to, and statistics of BatchNorm are taken over its rows.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torchmetrics import Metric

from lightning_hybrid.batch.split import batch_size_of, split_by_sizes
from lightning_hybrid.patching import around
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.verify.data import EVALUATIONS, DataSplit, Piece, Pieces, ReplicaStates, joined, split_loader
from lightning_hybrid.verify.record import RunRecord, prediction_leaves
from lightning_hybrid.verify.steps import has_batch_norm, rows_of_pieces


class _Drawn(Exception):
    """A step has drawn random numbers, in a run that ends there."""


class PlainRun:
    """The connection to a Trainer on one device.

    Attributes:
        devices: Number of processes.
        moved_generators: Whether a step that was not keyed drew from a generator of the process.
    """

    devices = 1
    _joins_replicas: ClassVar[bool] = True

    def __init__(
        self, data_split: DataSplit, *, keyed: bool = False, batch_norm: bool = True, until_drawn: bool = False
    ) -> None:
        """Set up the run.

        ``keyed`` draws random numbers as the strategies do, by step, microbatch and module; ``batch_norm`` takes the
        statistics of BatchNorm per microbatch, as the layout does; ``until_drawn`` ends a run that is not keyed after
        the first step that draws.
        """
        self.moved_generators = False
        self._data_split, self._pieces = data_split, Pieces(data_split)
        self._keyed, self._batch_norm, self._until_drawn = keyed, batch_norm, until_drawn
        self._evaluated = 0
        self._randomness: Any = None
        self._latest: tuple[Any, list[Any]] = (self, [])  # a batch, and those of the replicas in its step
        self._shape = (0, 0, 0)
        self._numbers: set[str] = set()
        self._predicted: list[dict[int, list[Any]]] = [{} for _ in range(data_split.replicas)]

    def strategy(self, pl: ModuleType) -> Any:
        """Make Lightning's strategy for one device, with its steps replaced on this instance."""
        strategy = importlib.import_module(f"{pl.__name__}.strategies").SingleDeviceStrategy(device="cpu")
        self._strategy: Any = strategy
        self._plain = {name: getattr(strategy, name) for name in ("training_step", *EVALUATIONS)}
        for name in self._plain:
            setattr(strategy, name, partial(self._logged_step, name))
        return strategy

    def _logged_step(self, step: str, batch: Any, *rest: Any) -> Any:
        """Run a step, and record the names of the plain numbers that it logs."""

        def log(original: Any, name: str, value: Any, *others: Any, **kwargs: Any) -> Any:
            if not isinstance(value, Metric):
                self._numbers.add(name)
            return original(name, value, *others, **kwargs)

        undo = around(self._module, "log", log, reason="the reference")
        try:
            loader = None if step == "training_step" else rest[1] if len(rest) > 1 else 0
            batches = self._batches(step, batch, loader)
            pieces, number = self._pieces.of(step, batches, self._number), self._number
            if loader is None:
                samples = max((batch_size_of(piece.batch) or 0 for piece in pieces), default=0)
                self._shape = max(self._shape, (len(batches), len(pieces) // len(batches), samples))
            else:
                self._evaluated += 1
                number = -1 - self._evaluated
            return self._step(step, batches, pieces, number, batch, *rest)
        finally:
            undo()

    def connect(self, trainer: Any, module: Any) -> None:
        """Split the loaders over several replicas."""
        self._trainer, self._module = trainer, module
        if self._randomness is None:  # a run that goes on from a checkpoint goes on with its seed
            seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
            self._randomness = KeyedRandomness(seed, torch.device("cpu"))
        connector, replicas = trainer._data_connector, self._data_split.replicas
        if replicas > 1:
            states = ReplicaStates()
            connector._prepare_dataloader = lambda dataloader, shuffle, mode: split_loader(
                trainer, dataloader, replicas, states, shuffle=shuffle, mode=mode, join=self._joins_replicas
            )

    def finish(self, observed: RunRecord) -> None:
        """Add what the steps have logged and predicted, and how the layout splits batches."""
        observed.batch, observed.step_numbers = self._shape, self._numbers
        observed.has_batch_norm = has_batch_norm(self._module)
        observed.has_undivided_draws = self._randomness.has_undivided_draws
        if self._data_split.replicas > 1:
            observed.replica_predictions = [prediction_leaves(list(each.values())) for each in self._predicted]

    def file_of(self, path: str) -> str:
        """The path: Lightning saves one file."""
        return path

    @property
    def _number(self) -> int:
        """Number of the latest training batch."""
        return int(self._trainer.fit_loop.epoch_loop.total_batch_idx)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, name: str, batches: list[Any], pieces: list[Piece], number: int, batch: Any, *rest: Any) -> Any:
        """Run a step of Lightning's, with the random numbers and the statistics of the layout's microbatches."""
        plain, rows = self._plain[name], joined(pieces, [None] * len(batches))
        if name == "predict_step" and len(self._predicted) > 1:
            return self._kept(self._predict(plain, batch, rest, number, rows), rest)
        # Where the module calls its backwards itself, each batch is one microbatch, and draws what one process draws.
        is_split = self._module.automatic_optimization or name != "training_step"
        with self._as_in_layout(number, rows) if is_split else contextlib.nullcontext():
            return plain(batch, *rest)

    def _predict(self, plain: Any, batch: Any, rest: Sequence[Any], number: int, rows: Sequence[Piece]) -> list[Any]:
        """Run a prediction on the samples of each replica."""
        predicted = []
        for own, part in zip(rows, split_by_sizes(batch, [sum(own.sizes) for own in rows]), strict=True):
            with self._as_in_layout(number, [own]):
                predicted.append(plain(part, *rest))
        return predicted

    def _kept(self, predictions: Sequence[Any], rest: Sequence[Any]) -> Any:
        """Keep the predictions of the replicas; return the first one's."""
        for own, predicted in zip(self._predicted, predictions, strict=False):
            own.setdefault(rest[1] if len(rest) > 1 else 0, []).append(predicted)
        return predictions[0]

    @contextlib.contextmanager
    def _as_in_layout(self, number: int, pieces: Sequence[Piece]) -> Iterator[None]:
        """Context of a step on these pieces; outside of it the generators go on as if nothing had been drawn inside."""
        keyed = self._randomness if self._keyed else None
        with (
            self._randomness.isolated(),
            rows_of_pieces(self._module, keyed, number, pieces, batch_norm=self._batch_norm),
        ):
            before = GeneratorStates(self._randomness.device)
            yield
            self.moved_generators |= keyed is None and not before.are_unchanged()
        if self.moved_generators and self._until_drawn:
            raise _Drawn("the run is repeated with keyed numbers")

    # -- batches ------------------------------------------------------------------------------------------------------

    def _batches(self, name: str, batch: Any, loader: int | None) -> list[Any]:
        """The batches of the replicas in this step; a closure that is called again gets the same."""
        if self._data_split.replicas == 1:
            return [batch]
        if self._latest[0] is not batch:
            self._latest = batch, self._drawn(name, batch, loader)
        return self._latest[1]

    def _drawn(self, name: str, batch: Any, loader: int | None) -> list[Any]:
        """The batches of the replicas as their loaders gave them; without replicas that have none left."""
        trainer = self._trainer
        loops = {
            "training_step": trainer.fit_loop,
            "test_step": trainer.test_loop,
            "predict_step": trainer.predict_loop,
        }
        combined = loops.get(name, trainer.fit_loop.epoch_loop.val_loop)._combined_loader
        sources = combined.flattened if loader is None else [combined.flattened[loader]]
        nothing = [None] * self._data_split.replicas
        rows = zip(*(source.pending.popleft() if source.pending else nothing for source in sources), strict=True)
        if loader is None:
            return [torch.utils._pytree.tree_unflatten(list(row), combined._spec) for row in rows]
        return [each for (each,) in rows if each is not None]
