"""The exchange of a step's results over pipeline ranks: logged numbers, the loss, and returned tensors.

The numbers are known once a rank has run its last forward, long before the last backward of the first stage ends. So
they are sent meanwhile, where the channel lets a collective overtake transfers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.batch.means import is_extreme, reduction_of
from lightning_hybrid.batch.merge import Argument, Leaf, join
from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.batch.scalars import BatchScalars
from lightning_hybrid.collectives.agreement import Digest, NumberExchange
from lightning_hybrid.collectives.tensors import broadcast_tensor
from lightning_hybrid.errors import StepError
from lightning_hybrid.host_copies import is_plain, read_numbers
from lightning_hybrid.pipeline.copies import ResultsOfCopy, exchange, with_scalars, with_values
from lightning_hybrid.pipeline.full_batch import SideEffectRun
from lightning_hybrid.pipeline.kept import AppendedEntries
from lightning_hybrid.pipeline.logs import Entry, Key, LogCapture, describe_unexplained, keyed, size_of
from lightning_hybrid.pipeline.means import MeanWeights
from lightning_hybrid.pipeline.measure import LossWeighting
from lightning_hybrid.pipeline.runtime.executor import fill_placeholders
from lightning_hybrid.pipeline.runtime.running_averages import RunningAverages
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.pipeline.stages.traces import Call, Microbatches
from lightning_hybrid.pipeline.stored import StoredValues
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.recording.kept import refuse_absent_numbers
from lightning_hybrid.step.replay.stage import StageRun
from lightning_hybrid.step.standins.numbers import ABSENT, has_absent_content, is_known, line_of_read
from lightning_hybrid.step.standins.tensors import is_absent

_EXACT_IN_FLOAT64 = frozenset({"float64", "float32", "float16", "bfloat16", "int32", "int16", "int8", "uint8"})


class StepResultExchange:
    """The exchange of one step's results; ``begin`` once a rank's forwards are done, ``finish`` after its backwards.

    Attributes:
        news: Where the step has stored something that is not known to be stored; "" if nowhere.
        digest: Of the batch, once the exchange has begun.
    """

    def __init__(
        self,
        plan: StagePlan,
        call: Call,
        given: Microbatches,
        logs: LogCapture,
        weights: Sequence[float],
        metrics: FullBatchMetrics,
        weighting: LossWeighting,
        shares: MeanWeights,
        stored: StoredValues,
    ) -> None:
        """Prepare the exchange; ``shares`` weigh recorded means by another count than samples.

        The step is broken where it stores something elsewhere than in the known places of ``stored``.
        """
        self._plan, self._call, self._given, self._sizes = plan, call, given, given.sizes
        self._metrics, self._log_run = metrics, given.log_run
        self._weighting, self._shares, self._measured = weighting, shares, dict(weighting.reductions)
        self._nearest = dict(weighting.nearest)
        self._reads = () if given.log_run is None else given.log_run.reads
        self._group, self._device = plan.group, plan.randomness.device
        self._logs, self._weights, self._variants = logs, weights, given.variants
        self._batch = Digest(flatten(given.batch)[0], logs.reads)  # now, since the step may write into it
        self._stored, self.news, self.digest = stored, "", 0
        self._entries: list[Entry] = []
        self._exchange: NumberExchange | None = None
        self._numbers: list[float] = []
        self._read: dict[tuple[int, int], float] = {}  # exchanged scalars, by microbatch and value
        self._combined_keys: set[Key | Argument] = set()
        self._has_guesses = any(v.dynamic for variant in given.variants for v in variant.assignment.graph.values)
        self._scalars: list[tuple[int, int]] = []
        self._tensors: list[tuple[int, int]] = []
        for index, variant in enumerate(given.variants):
            graph = variant.assignment.graph
            for value in dict.fromkeys((*(graph.returned if call.shares_output else ()), *graph.kept)):
                is_scalar = not graph.values[value].shape and graph.values[value].dtype in _EXACT_IN_FLOAT64
                (self._scalars if is_scalar else self._tensors).append((index, value))
            if call.trains and graph.loss is not None and (index, graph.loss) not in self._scalars:
                self._scalars.append((index, graph.loss))

    def begin(
        self, runs: Mapping[int, StageRun], is_broken: bool = False, averages: RunningAverages | None = None
    ) -> None:
        """Start to send this rank's numbers, once; ``averages`` where several ranks hold its stage."""
        if self._exchange is None:
            with self._call.context():  # metrics see the precision of the step
                self._exchange = self._begin(runs, is_broken, averages)

    def _begin(self, runs: Mapping[int, StageRun], is_broken: bool, averages: RunningAverages | None) -> NumberExchange:
        self.news = self._stored.news()  # now, as metrics are called below
        received = ResultsOfCopy(is_broken=is_broken or bool(self.news))
        if averages is not None:
            received = self._from_copies(runs, averages, received.is_broken)
        if received.is_broken:
            return NumberExchange([], self._group, names=0, batch=0, is_broken=True, device=self._device)
        reads = self._logs.reads
        made = {(index, value): runs[index].made.get(value) for index, value in self._scalars}
        waiting = {key: reads.add(each.detach()) for key, each in made.items() if is_plain(each)}
        self._entries = self._logs.entries()
        read = {key: reads.take(number) for key, number in waiting.items()}
        scalars = with_scalars([runs[index] for index in range(len(runs))], received.scalars)
        if averages is not None:
            for entry in self._entries:
                entry.values[:] = with_values(entry, scalars)
        graphs = [variant.assignment.graph for variant in self._variants]
        # What depends on weighted means has other values than those measured: the graph tells how it is made.
        weighted = graphs[0].dependents(frozenset[int]().union(*self._shares)) if any(self._shares) else ()
        for key in [key for key, entry in keyed(self._entries) if entry.value in weighted]:
            self._measured.pop(key, None)
        measured = self._measured, self._weighting.keys
        batch = BatchScalars(scalars, self._weights, self._sizes, self._metrics, graphs, *measured)
        for key, entry in keyed(self._entries):
            value = entry.value
            if (
                value is not None and not is_extreme(value, graphs[0]) and batch.is_mean(value)
            ):  # over equal counts, say
                self._nearest.pop(key, None)
        self._metrics.finish_all(batch)
        self._combined_keys |= batch.guessed
        # Microbatches with different traces have their numbers on different ranks: combined once all are received.
        numbers: list[float | Tensor] = [
            number
            for key, entry in keyed(self._entries)
            for number in (self._full_batch_number(key, entry, batch), *entry.values)
        ]
        for (index, value), scalar in made.items():
            if scalar is not None and value != self._variants[index].assignment.graph.loss and not batch.kind(value):
                numbers.append(_number(batch.value(value)))
            else:
                numbers.append(_number(read.get((index, value), scalar)))
        numbers += [_number(batch.value(value)) for value in self._reads]
        if self._has_guesses:
            # The last stage has most values; one number of each is sent.
            last, rank_of = self._plan.num_stages - 1, self._plan.rank_of
            numbers += [
                guess if self._plan.rank == rank_of(last, index) else ABSENT
                for entry in self._entries
                for index, guess in enumerate(entry.guesses)
            ]
        self.digest = self._batch.number()
        return NumberExchange(
            read_numbers(numbers),
            self._group,
            names=zlib.crc32("|".join(entry.name for entry in self._entries).encode()),
            batch=self.digest,
            trace=zlib.crc32(repr([variant.digest for variant in self._variants]).encode()),
            device=self._device,
        )

    def _from_copies(self, runs: Mapping[int, StageRun], averages: RunningAverages, is_broken: bool) -> ResultsOfCopy:
        """What the other ranks of this stage have computed, with their averages and calls of metrics in place."""
        sent = {index: run.scalars.sent() for index, run in runs.items() if run.scalars.values}
        received = exchange(self._plan, ResultsOfCopy(sent, self._metrics.calls, averages.updates, is_broken))
        averages.apply(received.averages)
        self._metrics.adopt_calls(received.metric_calls)
        return received

    def _full_batch_number(self, key: Key, entry: Entry, batch: BatchScalars) -> float | Tensor:
        """The number logged for the full batch; ``ABSENT`` where it is the combination of the microbatches'."""
        number: Any = None
        if len(self._variants) == 1:
            return ABSENT
        if entry.metric is not None:
            number = self._metrics.values()(entry.metric, None)
        elif any(map(math.isnan, entry.values)):  # one is elsewhere, or is no number: then the batch's is none either
            return ABSENT
        elif entry.value is not None and key not in self._measured:
            number = None if batch.is_mean(entry.value) else batch.value(entry.value)
        return _number(number)

    def _combined(self, key: Key, entry: Entry) -> float:
        if entry.is_plain and self._given.repeats_logs and len(set(entry.values)) == 1:
            return entry.values[0]
        weights = self._given.weights if key in self._weighting.keys else self._weights
        return entry.combine(
            weights, self._sizes, self._measured.get(key) or self._over(entry) or self._nearest.get(key, "")
        )

    def _over(self, entry: Entry) -> str:
        """How the graph makes a value of the samples: as "sum", "max" or "min" of them; "" if in another way."""
        if entry.value is None or None in self._sizes:
            return ""
        return reduction_of(entry.value, self._given.graph, self._sizes[0] or 0)

    @property
    def guessed(self) -> frozenset[Key | Argument]:
        """What was taken for a mean over microbatches though no analysis has shown that it is one; after ``finish``."""
        known = {
            key
            for key, entry in keyed(self._entries)
            if entry.metric is not None or entry.origin is not None or self._over(entry)
        }
        return frozenset(self._combined_keys - known)

    def warnings(self) -> list[tuple[Key | Argument | Leaf, str]]:
        """Warnings about numbers that are means over microbatches, and are known to be others of the batch, by key.

        What is logged is known on all ranks, an argument on the rank that calls its metric.
        """
        known = [each for each in self._weighting.unexplained if each[0] in self._combined_keys]
        return [(each[0], describe_unexplained(self._call.name, *each)) for each in known]

    def wait(self, agree: Callable[[Tensor], Tensor], is_broken: bool) -> tuple[bool, bool]:
        """Wait for the numbers of all ranks; returns whether the step broke on one, and on one of any replica.

        ``agree`` sums a tensor of shape (1,) over replicas, and ``is_broken`` says whether the step broke on this rank.
        """
        assert self._exchange is not None
        reads, flag = self._logs.reads, self._exchange.arrive(self._logs.reads)
        here, anywhere = reads.add(flag + float(is_broken)), reads.add(agree(flag + float(is_broken)))
        if not (is_broken_here := bool(reads.take(here))):
            self._numbers = self._exchange.finish()
        return is_broken_here, bool(reads.take(anywhere))

    def finish(self, runs: Mapping[int, StageRun]) -> tuple[list[tuple[Entry, float]], list[dict[int, Tensor]]]:
        """Broadcast the tensors, after ``wait``.

        Returns each logged entry with its number, and by microbatch the exchanged values by index, in their full
        shapes.
        """
        numbers, logged = iter(self._numbers), []
        guessed = iter(self._numbers[-sum(len(entry.values) for entry in self._entries) :])
        for key, entry in keyed(self._entries):
            of_batch, *values = [next(numbers) for _ in (None, *entry.values)]
            if self._has_guesses:
                guesses = [next(guessed) for _ in values]
                values = [value if is_known(value) else guess for value, guess in zip(values, guesses, strict=True)]
            if not is_known(of_batch):
                self._combined_keys.add(key)
                of_batch = self._combined(key, entry.with_values(values, entry.sizes))
            entry.reduce_sizes(self._measured.get(size_of(key), ""))
            logged.append(of_batch)
        content: list[dict[int, Tensor]] = [{} for _ in self._variants]
        for (index, value), number in zip(self._scalars, numbers, strict=False):
            described = self._variants[index].assignment.graph.values[value]
            dtype, device = getattr(torch, described.dtype), described.device or self._device
            rounded = torch.tensor(number, dtype=dtype)
            self._read[index, value], content[index][value] = float(rounded), rounded.to(device)
        if self._log_run is not None:
            found = self._log_run.numbers(dict(zip(self._reads, numbers, strict=False)))
            pairs = zip(keyed(self._entries), logged, strict=True)
            logged = [found.get(key, number) if entry.is_plain else number for (key, entry), number in pairs]
            self._combined_keys -= found.keys()
        for index, value in self._tensors:
            assignment = self._variants[index].assignment
            source = self._plan.rank_of(assignment.value_stage[value], index)
            made = runs[index].made.get(value) if source == self._group.rank() else None
            content[index][value] = broadcast_tensor(
                assignment.graph.values[value], made, source, self._group, self._device
            )
        return list(zip(self._entries, logged, strict=True)), content

    def join(
        self,
        runs: Sequence[StageRun],
        content: Sequence[Mapping[int, Tensor]],
        appended: AppendedEntries | None,
        side_effects: SideEffectRun | None,
    ) -> tuple[Any, Tensor | None]:
        """Fill absent tensors, and join the microbatches: what the step returns of the full batch, its scalar loss.

        ``content`` has the exchanged values of each microbatch, by index, in their full shapes.
        """
        outputs = []
        for run, values in zip(runs, content, strict=True):
            fill_placeholders(run, values)
            if not self._call.trains or not isinstance(run.result, Tensor):  # a bare loss is joined below
                outputs.append(map_leaves(detached, run.result))
        loss = None
        if self._call.trains:
            losses = [values[variant.loss] for values, variant in zip(content, self._variants, strict=True)]
            read = [self._read[index, variant.loss] for index, variant in enumerate(self._variants)]
            total = sum(loss * weight for loss, weight in zip(read, self._weights, strict=True))
            loss = losses[0].new_tensor(total)
        output = join(outputs, self._weights, self._given.sizes, step=self._call.name) if outputs else loss
        if side_effects is not None:
            returned = map_leaves(detached, side_effects.returned(content[0]))
            output = returned if outputs else loss
        if appended is not None:
            appended.put(appended.evenly(len(self._given), content), self._weights, self._given.sizes)
        check_content(self._call.name, output)
        if read_at := next((run.numbers_read for run in runs if run.numbers_read), ""):
            refuse_absent_numbers(self._plan.root, [variant.recording for variant in self._variants], read_at)
        return returned_batch(self._given.batch, self._given.parts, [run.result for run in runs], output), loss


def _number(value: Tensor | float | None) -> Tensor | float:
    """A number of this rank that is to be exchanged, which need not be read yet; ``ABSENT`` for none."""
    return ABSENT if value is None else value


def detached(leaf: Any) -> Any:
    """A leaf of an output, detached; None where its content was not requested."""
    if isinstance(leaf, Tensor):
        return None if is_absent(leaf) else leaf.detach()
    return leaf


def returned_batch(batch: Any, microbatches: Sequence[Any], results: Sequence[Any], output: Any) -> Any:
    """The output of a step; if it returns its own batch, the full batch updated with the joined entries."""
    if not all(result is microbatch for result, microbatch in zip(results, microbatches, strict=True)):
        return output
    if isinstance(batch, MutableMapping):
        batch.update(output)
        return batch
    if not isinstance(batch, Tensor) and hasattr(batch, "__dict__"):
        vars(batch).update(vars(output))
        return batch
    return output


def check_content(step: str, output: Any) -> None:
    """Check that no stand-in reaches user code."""
    for leaf in flatten(output)[0]:
        if has_absent_content(leaf):
            raise StepError(
                f"{line_of_read(leaf, step)}: {step} returns a number read from the model that is not known for the"
                " full batch; return the tensor instead (loss.detach()), or set num_microbatches=1",
                entry="outputs-number",
            )
