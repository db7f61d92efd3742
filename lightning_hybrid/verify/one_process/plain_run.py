"""The reference: the plain Trainer in one process, whose steps receive the batches of all replicas, joined to one.

Lightning runs the user's step, backward and hooks; nothing is split. Two things are those of the layout, which says so:
random numbers are keyed by the microbatch that a row belongs to, and so are the statistics of BatchNorm.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch

from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.split_batch_into_microbatches import batch_size_of, split_by_sizes
from lightning_hybrid.step.instrument.instrument_step import draw_as_stages
from lightning_hybrid.verify.one_process.batch_norm_per_microbatch import batch_norm_per_microbatch, is_batch_norm
from lightning_hybrid.verify.one_process.logged_numbers import record_logged_numbers
from lightning_hybrid.verify.one_process.pieces import EVALUATIONS, DataSplit, Piece, Pieces, known_sizes
from lightning_hybrid.verify.one_process.replica_loader import split_loader
from lightning_hybrid.verify.records.run_record_and_recorder import RunRecord, prediction_leaves


class PlainRun:
    """The connection to a Trainer on one device.

    Attributes:
        devices: Number of processes.
        moved_generators: Whether a step that was not keyed drew from a generator of the process.
    """

    devices = 1
    _joins_replicas: ClassVar[bool] = True

    def __init__(
        self, data_split: DataSplit, *, keyed: bool = False, reseed: int | None = None, batch_norm: bool = True
    ) -> None:
        """Set up the run.

        Args:
            data_split: How the layout splits the data.
            keyed: Whether to draw random numbers as the strategies do: keyed by step, microbatch and module.
            reseed: Seed of the random numbers inside steps, if not that of the run.
            batch_norm: Whether BatchNorm takes its statistics per microbatch, as the layout does.
        """
        self.moved_generators = False
        self._data_split, self._pieces = data_split, Pieces(data_split)
        self._keyed, self._reseed, self._batch_norm = keyed, reseed, batch_norm
        self._evaluated = 0
        self._randomness: Any = None
        self._latest_pieces: tuple[Any, list[Piece]] | None = None
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

    def _logged_step(self, name: str, *args: Any) -> Any:
        with record_logged_numbers(self._module, self._numbers):
            return self._step(name, *args)

    def connect(self, trainer: Any, module: Any) -> None:
        """Split the loaders over several replicas."""
        self._trainer, self._module = trainer, module
        if self._randomness is None:  # a run that goes on from a checkpoint goes on with its seed
            seed = torch.default_generator.initial_seed() & 0x7FFFFFFF
            self._randomness = KeyedRandomness(seed, torch.device("cpu"))
        connector, replicas = trainer._data_connector, self._data_split.replicas
        if replicas > 1:
            connector._prepare_dataloader = lambda dataloader, shuffle, mode: split_loader(
                trainer, dataloader, replicas, shuffle=shuffle, mode=mode, join=self._joins_replicas
            )

    def finish(self, observed: RunRecord) -> None:
        """Add what the steps have logged and predicted, and how the layout splits batches."""
        observed.batch, observed.step_numbers = self._shape, self._numbers
        observed.has_batch_norm = any(is_batch_norm(layer) for layer in self._module.modules())
        if self._data_split.replicas > 1:
            observed.replica_predictions = [prediction_leaves(list(each.values())) for each in self._predicted]

    @property
    def _number(self) -> int:
        """Number of the latest training batch."""
        return int(self._trainer.fit_loop.epoch_loop.total_batch_idx)

    def _step(self, name: str, batch: Any, *rest: Any) -> Any:
        """Run a step of Lightning's, with the random numbers and the statistics of the layout's microbatches."""
        plain, is_training, number = self._plain[name], name == "training_step", self._number
        loader = None if is_training else (rest[1] if len(rest) > 1 else 0)
        pieces = self._pieces_of(name, batch, number, loader)
        if not is_training:
            self._evaluated += 1
            number = -1 - self._evaluated
        if name == "predict_step" and self._data_split.replicas > 1:
            return self._predict(plain, batch, rest, number, pieces)
        # Where the module calls its backwards itself, each batch is one microbatch, and draws what one process draws.
        is_split = self._module.automatic_optimization or not is_training
        as_in_layout = self._as_in_microbatches(number, pieces) if is_split else contextlib.nullcontext()
        with as_in_layout:
            return plain(batch, *rest)

    def _predict(self, plain: Any, batch: Any, rest: Sequence[Any], number: int, pieces: Sequence[Piece]) -> Any:
        """Run a prediction on the samples of each replica; return the first one's."""
        replicas = sorted({piece.replica for piece in pieces})
        own = [[piece for piece in pieces if piece.replica == replica] for replica in replicas]
        parts = split_by_sizes(batch, [sum(known_sizes([piece.batch for piece in each])) for each in own])
        for replica, part in zip(replicas, parts, strict=True):
            with self._as_in_microbatches(number, own[replica]):
                predicted = plain(part, *rest)
            self._predicted[replica].setdefault(rest[1] if len(rest) > 1 else 0, []).append(predicted)
        return self._predicted[0][rest[1] if len(rest) > 1 else 0][-1]

    # -- what the layout does to a batch ------------------------------------------------------------------------------

    def _pieces_of(self, name: str, batch: Any, number: int, loader: int | None) -> list[Piece]:
        """The microbatches of a batch; a closure that is called again gets the same."""
        if self._latest_pieces is not None and self._latest_pieces[0] is batch:
            return self._latest_pieces[1]
        batches = [batch] if self._data_split.replicas == 1 else self._drawn(name, loader)
        pieces = self._pieces.of(name, batches, number)
        self._latest_pieces = batch, pieces
        if name == "training_step":
            samples = max((batch_size_of(piece.batch) or 0 for piece in pieces), default=0)
            self._shape = max(self._shape, (len(batches), len(pieces) // len(batches), samples))
        return pieces

    def _drawn(self, name: str, loader: int | None) -> list[Any]:
        """The batches of the replicas that are joined in this step, as their loaders gave them."""
        trainer = self._trainer
        fit = trainer.fit_loop
        loops = {"training_step": fit, "test_step": trainer.test_loop, "predict_step": trainer.predict_loop}
        combined = loops.get(name, fit.epoch_loop.val_loop)._combined_loader
        sources = combined.flattened if loader is None else [combined.flattened[loader]]
        rows = [source.pending.popleft() for source in sources if source.pending]
        if loader is not None:
            return [batch for batch in rows[0] if batch is not None]
        return [
            torch.utils._pytree.tree_unflatten([row[i] for row in rows], combined._spec) for i in range(len(rows[0]))
        ]

    @contextlib.contextmanager
    def _as_in_microbatches(self, number: int, pieces: Sequence[Piece]) -> Iterator[None]:
        by_replica = [[p for p in pieces if p.replica == replica] for replica in sorted({p.replica for p in pieces})]
        sizes = [known_sizes([piece.batch for piece in own]) for own in by_replica]
        if not all(sizes):
            sizes = []
        statistics = batch_norm_per_microbatch(self._module, sizes if self._batch_norm else [])
        flat = [size for each in sizes for size in each]
        numbers = [piece.number for piece in pieces] if len(flat) > 1 else []
        with self._random_state(number, pieces[0], numbers, flat if numbers else []), statistics:
            yield

    @contextlib.contextmanager
    def _random_state(
        self, number: int, first: Piece, numbers: Collection[int], sizes: Collection[int]
    ) -> Iterator[None]:
        """Isolate the generators: outside of steps they continue as if nothing had been drawn inside.

        Args:
            number: Of the step.
            first: The first microbatch of the batch inside.
            numbers: Of all of its microbatches.
            sizes: Of these.
        """
        randomness = self._randomness
        with randomness.isolated():
            if not self._keyed:
                if self._reseed is not None:
                    with randomness.microbatch(self._reseed, number):
                        pass
                before = GeneratorStates(randomness.device)
                yield
                self.moved_generators |= not before.are_unchanged()
                return
            with (
                draw_as_stages(self._module_of(first.replica), randomness, number, first.number),
                randomness.rows_of_microbatches(number, numbers, sizes),
            ):
                yield

    def _module_of(self, replica: int) -> Any:
        """The module that a replica's step runs on."""
        return self._module
