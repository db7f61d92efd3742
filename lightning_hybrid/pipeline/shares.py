"""Shares of a batch: the ranks of a pipeline each run the user's step on some samples, where it cannot be partitioned.

Their losses are weighted by their numbers of samples, so that gradients are those of the full batch where the loss is
a mean over samples. Logged values and outputs are gathered on every one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.batch.merge import RETURNED, Microbatches, join, with_numbers
from lightning_hybrid.batch.metrics import FullBatchMetrics, MetricCalls, joined_calls
from lightning_hybrid.batch.split import BatchSplitter, batch_size_of, sizes_of, split
from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.host_copies import is_plain
from lightning_hybrid.pipeline.exchange import detached
from lightning_hybrid.pipeline.kept import AppendedEntries, Rows, merged
from lightning_hybrid.pipeline.logs import Entry, LogCapture, NumberKey, keyed, keys_of, size_of
from lightning_hybrid.pipeline.measure import LossWeighting
from lightning_hybrid.pipeline.runner import MicrobatchRunner
from lightning_hybrid.pipeline.runtime.gradients import ParameterGradients, split_weight
from lightning_hybrid.pipeline.stages.traces import Call
from lightning_hybrid.schedule import Action, Kind
from lightning_hybrid.step.module_state.attributes import put
from lightning_hybrid.step.module_state.snapshots import reachable_leaves
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.objects.tensors import on_host
from lightning_hybrid.step.standins.numbers import ABSENT
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, materialize
from lightning_hybrid.step.tracing.functions import BackwardCode
from lightning_hybrid.step.tracing.lines import TorchCallSites, user_call_sites
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.step.tracing.refusals import check_scalar, no_loss_error

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class BatchShare:
    """The share of a batch that one rank runs."""

    microbatches: Sequence[Any]  # run one after the other
    weights: Sequence[float]  # their fractions of the samples; over all ranks they sum to 1
    loss_weights: Sequence[float]  # the weights of their losses in that of the full batch; over all ranks they sum to 1
    first: int = 0  # index of the first microbatch among those of the full batch
    total: int = 1  # number of microbatches of the full batch
    ranks: int = 1  # number of ranks that share the batch; 1 if each of them runs all of it

    @property
    def is_complete(self) -> bool:
        """Whether this rank runs all of several microbatches."""
        return self.ranks == 1 < self.total


class BatchSharing:
    """The ranks that share the batches of one replica.

    Attributes:
        rank: The index of this rank.
        size: The number of ranks.
        everyone: These ranks and those of other replicas.
        are_all: Whether there are no other replicas.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        """``everyone`` adds the ranks of other replicas to ``group``: they hold shards of the same parameters."""
        self._group, self.everyone = group, everyone
        self.rank, self.size = group.rank(), group.size()
        self.are_all = group.size() == everyone.size()

    def of(self, batch: Any, count: int, splitter: BatchSplitter | None, weighting: LossWeighting) -> BatchShare:
        """This rank's share of a batch; all of it where there is not a sample for each rank."""
        count = self.count(batch, count, splitter)
        if not count:
            return BatchShare([batch], [1.0], [1.0])
        first, total = self.rank * count, self.size * count
        parts, weights = split(batch, total, splitter)
        here, loss_weights = slice(first, first + count), weighting.of(parts, weights)
        return BatchShare(parts[here], weights[here], loss_weights[here], first, total, self.size)

    def count(self, batch: Any, count: int, splitter: BatchSplitter | None) -> int:
        """Microbatches of each share; 0 where there is not a sample for each rank."""
        size = batch_size_of(batch)
        if splitter is not None or (self.size == 1 and size is None):
            return count
        return 0 if size is None else min(count, size // self.size)

    def any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on any rank of any replica; collective over all of them."""
        return bool(self.max_over_ranks(int(condition)))

    def max_over_ranks(self, number: int) -> int:
        """The largest number of all ranks of all replicas; collective over them."""
        return max(gather_on_all(number, self.everyone))

    def gather(self, local: MicrobatchResults) -> MicrobatchResults:
        """All-gather the results of a step that each rank has run on a share; collective."""
        entries: Any = [_picklable(entry) for entry in local.entries]
        outputs, appended = map_leaves(on_host, local.outputs), map_leaves(on_host, local.appended)
        calls = map_leaves(on_host, local.metric_calls)
        sent = replace(local, entries=entries, outputs=outputs, appended=appended, metric_calls=calls)
        rows = gather_on_all(sent, self._group)
        rows[self.rank] = local
        return MicrobatchResults(
            weights=[weight for row in rows for weight in row.weights],
            loss_weights=[weight for row in rows for weight in row.loss_weights],
            by_samples=local.by_samples,
            reductions=local.reductions,
            entries=_joined_entries(rows, self.rank),
            losses=[loss for row in rows for loss in row.losses],
            sizes=[size for row in rows for size in row.sizes],
            outputs=[output for row in rows for output in row.outputs],
            appended=merged([row.appended for row in rows], [len(row.weights) for row in rows]),
            metric_calls=joined_calls([(len(row.weights), row.metric_calls) for row in rows]),
            news=CHANGES_MODULES if _branches_differ(rows) else max(row.news for row in rows),
        )


def _branches_differ(rows: Sequence[MicrobatchResults]) -> bool:
    """Whether the step took different branches on some shares: it may decide by a number of the batch."""
    return len({(row.calls, None in row.losses) for row in rows}) > 1


def _picklable(entry: Entry) -> Any:
    """The fields of an entry that other ranks need, as a picklable tuple."""
    kwargs = {name: value for name, value in entry.kwargs.items() if isinstance(value, _PLAIN)}
    return entry.name, entry.values, entry.sizes, kwargs, entry.dtype


def _joined_entries(rows: Sequence[MicrobatchResults], rank: int) -> list[Entry]:
    """The entries of all ranks with their values by microbatch, in the order of the first rank that has each."""
    counts = [len(row.weights) for row in rows]
    named = [[entry if isinstance(entry, tuple) else _picklable(entry) for entry in row.entries] for row in rows]
    by_rank = [{key: index for index, key in enumerate(keys_of(name for name, *_ in entries))} for entries in named]
    joined = []
    for key in dict.fromkeys(key for indices in by_rank for key in indices):
        values: list[float] = []
        sizes: list[int | None] = []
        for entries, indices, count in zip(named, by_rank, counts, strict=True):
            entry = entries[indices[key]] if key in indices else ("", [ABSENT] * count, [None] * count)
            values += entry[1]
            sizes += entry[2]
        if key in by_rank[rank]:
            joined.append(rows[rank].entries[by_rank[rank][key]].with_values(values, sizes))
        else:
            owner = next(other for other, indices in enumerate(by_rank) if key in indices)
            name, _, _, kwargs, dtype = named[owner][by_rank[owner][key]]
            joined.append(Entry(name, None, kwargs, values, sizes, dtype))
    return joined


RUNS_OTHER_LINES, CHANGES_MODULES = 1, 2  # values of ``MicrobatchResults.news``


@dataclass
class MicrobatchResults:
    """The results of a step, by microbatch."""

    weights: list[float]  # weights of the microbatches by samples
    loss_weights: list[float]  # weights of their losses
    # logged keys, and arguments of metrics, that weigh by samples even where the loss does not
    by_samples: frozenset[NumberKey]
    entries: list[Entry]  # logged entries, with a value per microbatch; ``ABSENT`` where one has not logged it
    losses: list[float | None]  # none where a microbatch has returned none
    sizes: list[int | None]  # numbers of samples
    outputs: list[Any]  # return values, detached; empty if no code reads them
    appended: Rows = field(default_factory=dict)  # entries appended to lists of the user's modules
    # ``CHANGES_MODULES`` if it has changed the modules by its batch in another way; ``RUNS_OTHER_LINES`` if it has run
    # other lines of code than before; else 0
    news: int = 0
    calls: frozenset[int] = frozenset()  # the lines of code that it has run
    # how microbatches make a number of the batch, where that is known
    reductions: Mapping[NumberKey, str] = field(default_factory=dict)
    # calls of metrics, which these make with the full batch in the end
    metric_calls: MetricCalls = field(default_factory=dict)

    def joined_output(self, step: str) -> Any:
        """The output for the full batch of the step of this name."""
        if not self.outputs:
            return None
        joined = join(self.outputs, self.weights, self.sizes, step=step)
        return with_numbers(joined, self.outputs, self.batch, RETURNED)

    @property
    def batch(self) -> Microbatches:
        """How the batch's numbers follow from the microbatches'."""
        return Microbatches(self.loss_weights, self.sizes, self.reductions, self.by_samples)

    @property
    def loss(self) -> float | None:
        """The loss of the full batch; None if no microbatch has one."""
        pairs = zip(self.losses, self.loss_weights, strict=True)
        present = [(loss, weight) for loss, weight in pairs if loss is not None]
        return sum(loss * weight for loss, weight in present if weight) if present else None

    def call_metrics(self, metrics: FullBatchMetrics) -> None:
        """Call the metrics with the full batch, and let entries have the values that they return."""
        metrics.finish_all(self.batch, self.metric_calls)
        value_of = metrics.values()
        for entry in self.entries if self.metric_calls else ():
            if (value := value_of(entry.metric, entry.origin)) is not None:
                entry.set_value(value)

    def logs(self) -> list[tuple[Entry, float]]:
        """Each entry with its value for the full batch, of the microbatches that have logged it."""
        for key, entry in keyed(self.entries):
            entry.reduce_sizes(self.reductions.get(size_of(key), ""))
        return [
            (entry, entry.combine(self.weights if key in self.by_samples else self.loss_weights, self.sizes, over))
            for key, entry in keyed(self.entries)
            for over in (self.reductions.get(key, ""),)
        ]


class MicrobatchLoop:
    """Runs the microbatches of one step one after the other, and collects their results.

    Attributes:
        logs: Captured calls of ``self.log``.
        outputs: Return values of the step, by microbatch; detached in training.
        losses: By microbatch; None where the step returned none. Empty without backwards.
        calls: Lines of code that have run, where they are traced.
        scales_gradients: As in ``__init__``; no longer None once a function was applied.
    """

    def __init__(
        self,
        runner: MicrobatchRunner,
        call: Call,
        share: BatchShare,
        gradients: ParameterGradients,
        metrics: FullBatchMetrics,
        appended: AppendedEntries | None,
        scales_gradients: bool | None,
    ) -> None:
        """Set up for the share of a batch.

        ``scales_gradients`` tells whether microbatches weigh where their gradients reach a parameter; None if they do
        once the step has applied an autograd function of the user.
        """
        self._runner, self._root, self._share, self._gradients = runner, gradients.root, share, gradients
        self._call, self._metrics, self._appended = call, metrics, appended
        self.scales_gradients = scales_gradients
        self.logs = LogCapture(len(share.microbatches))
        self.outputs: list[Any] = []
        self.losses: list[Tensor | None] = []
        self.calls: set[int] = set()

    def run(
        self,
        seeds: Sequence[float],
        keyed: Callable[[int], AbstractContextManager[None]],
        learns: Callable[[bool], bool] | None,
        *,
        traces_calls: bool,
    ) -> None:
        """Run all microbatches; ``seeds`` weigh their losses, ``keyed`` keys the random numbers of one by index.

        ``learns`` is called after the first forward with whether it has left code of the user for its backward; if it
        returns true, nothing else is run. It is None if that is known. ``traces_calls`` tells whether lines of code are
        traced.
        """
        runner, backwards = self._runner, self._call.backwards
        for index, microbatch in enumerate(self._share.microbatches):
            start = backwards.recorder.mark()
            path = TorchCallSites() if traces_calls else None
            code = BackwardCode() if backwards.are_run and self.scales_gradients is None else None
            with (
                runner.active.around_step(),
                self._call.context(),
                keyed(index),
                self.logs.microbatch(self._root, index, self._metrics.origin),
                self._metrics.microbatch(index, is_full=self._share.total == 1),
                self._gradients.registered.run(),
            ):
                # Compiled code shows neither lines nor autograd functions; a mode would be compiled with it.
                is_eager = path is not None or (index == 0 and learns is not None)
                with path or contextlib.nullcontext(), _stance(is_eager), code or contextlib.nullcontext():
                    output = self._call.on(microbatch)()
                if runner.gathers_outputs:
                    output = _gathered(self._root, output)
            if path is not None:
                self.calls |= user_call_sites(set(path.calls)).keys()
            backwards.recorder.add(Action(Kind.F, 0, index), start)
            if backwards.are_run:
                self.scales_gradients = True if code is not None and code.has_functions else self.scales_gradients
                if index == 0 and learns is not None and learns(code is not None and not code.is_empty):
                    return
                # A layer that is recomputed saves the tensors that its forward has saved: compiled code saves others.
                with runner.guards.off(), _stance(is_eager):
                    self.losses.append(self._backward(output, seeds[index], index))
                backwards.recorder.add_since_last(Action(Kind.B, 0, index))
            self.outputs.append(map_leaves(detached, output) if self._call.trains else output)
            if self._appended is not None:
                self._appended.after_microbatch()
            del output, microbatch
        if backwards.are_run:
            with runner.guards.off():  # a reducer that read full gradients would average those
                backwards.reduce(0)

    def forget_outputs(self) -> None:
        """Keep no return values: no code reads them."""
        self.outputs = []

    def _backward(self, output: Any, seed: float, index: int) -> Tensor | None:
        """Run the backward of a microbatch, which weighs its loss by ``seed`` in all; returns its detached loss."""
        backwards = self._call.backwards
        seed, factor = split_weight(seed, self._share.ranks * self._share.weights[index], scales=self.scales_gradients)
        is_last = index == len(self._share.microbatches) - 1
        loss = find_loss(output)
        if isinstance(loss, Tensor):
            backwards.on_loss(loss)
        backwards.before(0, is_last)
        if output is not None:
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise no_loss_error(self._root, "training_step", output)
            check_scalar(self._root, "training_step", loss, "a microbatch")
            with self._gradients.by(factor, is_last=is_last):
                torch.autograd.backward([loss], [torch.full_like(loss, backwards.seed_factor * seed)])
        backwards.after(0, is_last)
        return None if output is None else loss.detach()

    def results(
        self, weights: list[float], loss_weights: list[float], by_samples: frozenset[NumberKey]
    ) -> MicrobatchResults:
        """The results of this rank; arguments as the attributes of ``MicrobatchResults``."""
        waiting = [self.logs.reads.add(loss) if is_plain(loss) else loss for loss in self.losses]
        entries, sizes = self.logs.entries(), sizes_of(self._share.microbatches)
        losses = [self._loss(loss) for loss in waiting] or [None] * len(weights)
        found = MicrobatchResults(weights, loss_weights, by_samples, entries, losses, sizes, self.outputs)
        found.appended = {} if self._appended is None else self._appended.rows
        return found

    def _loss(self, waiting: int | Tensor | None) -> float | None:
        if waiting is None:
            return None
        return float(self.logs.reads.take(waiting) if isinstance(waiting, int) else waiting)


def _stance(is_eager: bool) -> AbstractContextManager[object]:
    return torch.compiler.set_stance("force_eager") if is_eager else contextlib.nullcontext()


def _gathered(root: nn.Module, output: Any) -> Any:
    """Gather the sharded tensors in the output of a step, and the ones that it has stored on modules."""
    stored = [(path, leaf) for path, leaf in reachable_leaves(root, plain=False) if isinstance(leaf, ShardedTensorBase)]
    put(root, [path for path, _ in stored], [materialize(leaf).detach() for _, leaf in stored])
    return map_leaves(materialize, output)
