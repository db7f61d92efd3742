"""The reference: one process and plain Lightning, which calls the user's step once per part of the batch.

This is what the strategies promise: the batches of all replicas, each in its microbatches, the gradient the mean over
them. Nothing of the pipeline takes part; parts are accumulated like batches in gradient accumulation.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.pipeline.results.log_capture import Entry, LogCapture
from lightning_hybrid.pipeline.results.metric_weights import CountedMetrics
from lightning_hybrid.randomness.keyed_draws import GeneratorStates, KeyedRandomness
from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.batch.microbatch import (
    BatchError,
    batch_size_of,
    choose_count,
    join_batches,
    sizes_of,
    split,
)
from lightning_hybrid.step.instrument.instrument import drawing_as_stages
from lightning_hybrid.step.tracing.metric_nodes import find_sinks
from lightning_hybrid.verify.one_process.data_split import Cut
from lightning_hybrid.verify.one_process.microbatch_state import GradientDeposit, PartsKept
from lightning_hybrid.verify.one_process.replica_modules import Replicas
from lightning_hybrid.verify.one_process.replica_samplers import DealtLoader, deal
from lightning_hybrid.verify.records.run_record import Observed, held, leaves_of

EVALUATIONS = frozenset({"validation_step", "test_step", "predict_step"})


@dataclass(frozen=True)
class _Part:
    replica: int
    number: int  # over all replicas, as the strategies key it
    batch: Any
    weight: float
    share: int = 0


class PartsReference:
    """Connects with a Trainer on one device; makes each step run once per part."""

    devices = 1
    moved_generators = False  # whether a step that was not keyed drew from a generator of the process

    def __init__(self, cut: Cut, *, keyed: bool = False, reseed: int | None = None, whole: bool = False) -> None:
        """How to run the parts.

        Args:
            cut: How the data are cut.
            keyed: Draw as the strategies do: keyed by step, microbatch and module.
            reseed: Seed of what steps draw, if not that of the run.
            whole: Run the step once, on the replicas' batches concatenated.
        """
        self._cut, self._keyed, self._reseed, self._whole = cut, keyed, reseed, whole
        self._usual: dict[str, tuple[int, int]] = {}
        self._taken: tuple[Any, list[Any]] | None = None
        self._losses: dict[int, list[float]] = {}
        self._predicted: list[dict[int, list[Any]]] = [{} for _ in range(cut.replicas)]
        self._evaluated = 0

    # -- what `run_once` asks for -------------------------------------------------------------------------------------

    def strategy(self, pl: ModuleType) -> Any:
        """Lightning's own for one device, with its steps replaced on this instance."""
        strategy = importlib.import_module(f"{pl.__name__}.strategies").SingleDeviceStrategy(device="cpu")
        self._strategy: Any = strategy
        self._plain = {name: getattr(strategy, name) for name in ("training_step", *EVALUATIONS)}
        strategy.training_step = self._training_step
        for name in EVALUATIONS:
            setattr(strategy, name, partial(self._evaluation_step, name))
        return strategy

    def connect(self, trainer: Any, module: Any) -> None:
        """Deal the data of several replicas."""
        self._trainer, self._replicas = trainer, Replicas(module, trainer)
        self._randomness = KeyedRandomness(torch.default_generator.initial_seed() & 0x7FFFFFFF, torch.device("cpu"))
        connector, replicas = trainer._data_connector, self._cut.replicas
        if replicas > 1:
            connector._prepare_dataloader = lambda dataloader, shuffle, mode: deal(
                trainer, dataloader, replicas, shuffle=shuffle, mode=mode
            )

    def finish(self, observed: Observed) -> None:
        """Add what is known of each replica."""
        observed.replica_losses = list(self._losses.values())
        observed.replica_predictions = [leaves_of(list(loaders.values())) for loaders in self._predicted]
        if len(self._replicas.modules) > 1:
            self._replicas.before_step()
            observed.replica_buffers = [held(module.named_buffers()) for module in self._replicas.modules]

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
        if self._whole or not module.automatic_optimization:
            return self._at_once(batches, rest)
        parts = self._parts("training_step", batches, [1 / len(batches)] * len(batches))
        if len(parts) == 1 and not self._keyed:
            with self._draws(0, parts[0]):
                output = self._plain["training_step"](batch, *rest)
            loss = _loss_of(output)
            self._note([] if loss is None else [float(loss)])
            return output
        number, deposit = self._trainer.fit_loop.epoch_loop.total_batch_idx, GradientDeposit(module)

        def backward(part: _Part, output: Any) -> Any:
            loss = _loss_of(output)
            if loss is not None:
                (loss * part.weight).backward()
            return _detached(output)

        with deposit:
            outputs = self._run("training_step", batches, parts, rest, number, backward)
        if any(_loss_of(output) is None for output in outputs):
            return None
        self._note(
            [
                sum(float(_loss_of(o)) * p.weight for o, p in zip(outputs, parts, strict=True) if p.replica == r)
                / sum(p.weight for p in parts if p.replica == r)
                for r in range(len(batches))
            ]
        )
        total = sum(float(_loss_of(output)) * part.weight for output, part in zip(outputs, parts, strict=True))
        loss = deposit.loss(_loss_of(outputs[0]).new_tensor(total))
        joined = _join(outputs, parts)
        return {**joined, "loss": loss} if isinstance(joined, Mapping) else loss

    def _note(self, losses: list[float]) -> None:
        # What callbacks are shown is of the last of the closures that an optimizer has called for this batch, and has
        # been divided by the number of accumulated batches.
        number = self._trainer.fit_loop.epoch_loop.total_batch_idx
        self._losses[number] = [loss / self._trainer.accumulate_grad_batches for loss in losses]

    def _evaluation_step(self, name: str, batch: Any, *rest: Any) -> Any:
        trainer = self._trainer
        fitting = trainer.fit_loop.epoch_loop.val_loop
        loop = {"test_step": trainer.test_loop, "predict_step": trainer.predict_loop}.get(name, fitting)
        index = rest[1] if len(rest) > 1 else 0
        batches = self._batches(batch, loop._combined_loader, index)
        sizes = sizes_of(batches)
        known = [size for size in sizes if size is not None]
        if len(known) < len(batches):
            known = [1] * len(batches)
        shares = [size / sum(known) for size in known]
        parts = self._parts(name, batches, shares)
        self._evaluated += 1
        if len(parts) == 1 and not self._keyed:
            with self._draws(0, parts[0]):
                outputs = [self._plain[name](batch, *rest)]
        else:
            outputs = self._run(name, batches, parts, rest, -1 - self._evaluated, lambda part, output: output)
        if name != "predict_step":
            return _join(outputs, parts)
        for replica in range(len(batches)):
            mine = [place for place, part in enumerate(parts) if part.replica == replica]
            predicted = _join([outputs[place] for place in mine], [parts[place] for place in mine])
            self._predicted[replica].setdefault(index, []).append(predicted)
        return self._predicted[0][index][-1]

    def _at_once(self, batches: list[Any], rest: tuple[Any, ...]) -> Any:
        return self._plain["training_step"](join_batches(batches), *rest)

    def _run(
        self,
        name: str,
        batches: list[Any],
        parts: list[_Part],
        rest: tuple[Any, ...],
        number: int,
        after: Callable[[_Part, Any], Any],
    ) -> list[Any]:
        """The user's step on each part; what it logs is logged once."""
        logs = LogCapture(len(parts))
        outputs = []
        for metric in (m for m in self._module.modules() if isinstance(m, Metric)):
            metric._forward_cache = None
        self._replicas.before_step(parts[-1].replica)
        self._replicas.share_buffers(name)
        for replica in range(len(batches)):
            mine = [(place, part) for place, part in enumerate(parts) if part.replica == replica]
            if not mine:
                continue
            module = self._replicas.in_step(replica)
            in_shares = self._cut.has_ended(self._latest) and name == "training_step"
            kept = PartsKept(module, self._cut.shares if in_shares else 1) if len(mine) > 1 else None
            counted, share = CountedMetrics(find_sinks(module)), sum(part.weight for _, part in mine)
            for place, part in mine:
                if kept is not None:
                    kept.before_part(part.share)
                weighed = counted.microbatch(part.weight / share)
                with self._draws(number, part), logs.microbatch(module, place), self._as_model(module), weighed:
                    outputs.append(after(part, self._plain[name](part.batch, *rest)))
                if kept is not None:
                    kept.after_part()
            if kept is not None:
                kept.finish([part.weight for _, part in mine], sizes_of([part.batch for _, part in mine]))
            counted.close()
        self._replicas.after_step()
        self._log(logs.entries(), parts)
        return outputs

    def _log(self, entries: list[Entry], parts: list[_Part]) -> None:
        module = self._module
        sizes = sizes_of([part.batch for part in parts])
        replicas = sorted({part.replica for part in parts})
        shares = [sum(part.weight for part in parts if part.replica == replica) for replica in replicas]
        for entry in entries:
            each = [
                entry.with_values(
                    [entry.values[place] for place, part in enumerate(parts) if part.replica == replica], []
                ).combine([part.weight / share for part in parts if part.replica == replica])
                for replica, share in zip(replicas, shares, strict=True)
            ]
            known = [(value, share) for value, share in zip(each, shares, strict=True) if value == value]
            total = sum(share for _, share in known)
            value = each[0]
            if known:
                value = _over_replicas(entry.how, [v for v, _ in known], [s / total for _, s in known])
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
        if self._cut.replicas == 1:
            return [batch]
        if self._taken is not None and self._taken[0] is batch:
            return self._taken[1]
        sources: list[DealtLoader] = combined.flattened if loader is None else [combined.flattened[loader]]
        rows = [source.dealt.popleft() if source.dealt else [None] * self._cut.replicas for source in sources]
        others = []
        for replica in range(1, self._cut.replicas):
            drawn = [row[replica] for row in rows]
            if loader is None:
                other = torch.utils._pytree.tree_unflatten(drawn, combined._spec)
            elif drawn[0] is None:
                continue
            else:
                [other] = drawn
            others.append(self._transferred(other, loader or 0))
        self._taken = batch, [batch, *others]
        return self._taken[1]

    def _transferred(self, batch: Any, loader: int) -> Any:
        batch = self._strategy.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=loader)
        return self._strategy.batch_to_device(batch, dataloader_idx=loader)

    def _parts(self, name: str, batches: list[Any], shares: list[float]) -> list[_Part]:
        cut, parts = self._cut, []
        for replica, (batch, share) in enumerate(zip(batches, shares, strict=True)):
            if name in cut.at_once:
                parts.append(_Part(replica, replica, batch, share))
                continue
            try:
                count = choose_count(batch, cut.num_microbatches, cut.num_stages, cut.splitter)
            except BatchError:
                count = 1  # the layout refuses this batch; or runs it whole, if the number was its own choice
            size = batch_size_of(batch)
            if name == "training_step" and cut.is_whole(self._latest, size):
                parts.append(_Part(replica, replica, batch, share))
                continue
            ranks = cut.shares if cut.has_ended(self._latest) else 1
            if size is not None and cut.splitter is None:
                usual = self._usual.setdefault(name, (size, count))
                if size >= usual[0]:
                    self._usual[name] = size, count
                else:
                    count = -(-size // -(-usual[0] // usual[1]))  # a short batch: parts of the usual size
            if name == "training_step":
                count = (count if size is None else min(count, size // ranks)) * ranks
            pieces, weights = split(batch, count, cut.splitter)
            for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
                of_share = index // (count // ranks) if name == "training_step" else 0
                parts.append(_Part(replica, replica * count + index, piece, weight * share, of_share))
        if cut.weight is not None and name == "training_step":
            counts = [float(cut.weight(part.batch)) for part in parts]
            parts = [replace(p, weight=c / sum(counts)) for p, c in zip(parts, counts, strict=True)]
        return parts

    # -- replicas -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _as_model(self, module: Any) -> Iterator[None]:
        strategy = self._strategy
        before = strategy._lightning_module, strategy._model
        strategy._lightning_module = strategy._model = module
        try:
            yield
        finally:
            strategy._lightning_module, strategy._model = before

    @contextlib.contextmanager
    def _draws(self, number: int, part: _Part) -> Iterator[None]:
        """Generators run on outside of steps as if nothing had been drawn inside."""
        with self._randomness.isolated():
            if not self._keyed:
                if self._reseed is not None:
                    with self._randomness.microbatch(self._reseed, number):
                        pass
                before = GeneratorStates(self._randomness.device)
                yield
                self.moved_generators |= not before.still_stand()
                return
            with drawing_as_stages(self._replicas[part.replica], self._randomness, number, part.number):
                yield


def _over_replicas(how: str, values: list[float], shares: list[float]) -> float:
    if how in ("max", "min"):
        return max(values) if how == "max" else min(values)
    return sum(values) if how == "sum" else sum(v * share for v, share in zip(values, shares, strict=True))


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _detached(output: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _join(outputs: list[Any], parts: list[_Part]) -> Any:
    return join(outputs, [part.weight for part in parts], sizes_of([part.batch for part in parts]))
