"""Microbatch weights of the means that a recorded step takes over labels or masks of the batch.

The counts must be known before the first backward, so the step first runs on each microbatch without the model's
arithmetic; only steps with such a mean do this, and not where all labels are elements of the batch and none is ignored:
then the batch is searched for the ignored label, which is the one time that the host waits before the step. Where
a sum is divided by a number computed from the batch, it runs so on the full batch too: the number of the batch need not
be the sum of the microbatches' (``count.clamp(min=1)``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.batch.denominators import SAMPLES, Count, uneven_masks, weights_differ
from lightning_hybrid.batch.elements import BatchElements
from lightning_hybrid.batch.means import (
    Share,
    count,
    data_dependent_means,
    is_sum_over_samples,
    labels_of,
    leads_to_loss,
    matching_values,
    picked_rows,
    reached_by,
)
from lightning_hybrid.batch.merge import REDUCTIONS
from lightning_hybrid.batch.split import (
    BatchSplitter,
    batch_size_of,
    copied_batch,
    neighbouring_microbatches,
    split,
    without_last_sample,
)
from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.host_copies import read_numbers
from lightning_hybrid.pipeline.full_batch import differ
from lightning_hybrid.pipeline.logs import Entry, Key, LogCapture, keyed
from lightning_hybrid.pipeline.measure import LossWeighting
from lightning_hybrid.pipeline.reductions import is_same, rounded_as
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.pipeline.stages.traces import Call, Microbatches, TraceCache
from lightning_hybrid.pipeline.undone import undone_runs
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot
from lightning_hybrid.step.objects.cache import BoundedLRUDict
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.objects.tensors import as_plain_tensor
from lightning_hybrid.step.replay.stage import ReplayWatch, StageReplay
from lightning_hybrid.step.tracing.recording import find_loss

_MAX_CACHED = 512
_EQUAL = 1e-12
_IGNORED = frozenset({-100})  # torch's default ``ignore_index``
MeanWeights = Sequence[Mapping[int, Share]]


class ComparedLoss(NamedTuple):
    """The loss of a batch, and of its microbatches by two weightings."""

    full: float  # the loss of the batch
    by_means: float  # with the weights of recorded means
    by_samples: float  # all of it weighted by samples
    dtype: torch.dtype  # the dtype in which the losses were rounded
    logged: frozenset[Key]  # what is logged, and is the batch's as a mean with the weights of recorded means

    def agrees(self, other: float) -> bool:
        """Whether a loss of the microbatches equals the batch's."""
        return is_same(self.full, other, self.dtype)


@dataclass(frozen=True)
class _EvenCounts:
    """A batch whose microbatches had equal counts of labels per sample; others without ignored labels have them too."""

    state: list[Any]  # attributes of the modules around units at that time
    ignored: frozenset[int]  # the labels that do not count


# Of 46 modules of the conformance suite two have such means in 4 microbatches (MultiHorizon, DeepLab). It stays beside
# the measured weights since these run the batch on one rank: a language model with ignored labels that fits no rank
# would not be split.
class LossMeanWeights:
    """Computes and caches the weights of recorded means, for the steps of one module.

    Attributes:
        unknown: The line of a mean whose counts differed between microbatches and that cannot be weighted by them.
    """

    def __init__(self, plan: StagePlan, traces: TraceCache) -> None:
        """Set up for the stages of a module, and the traces of its steps."""
        self._plan, self._traces = plan, traces
        self.unknown = ""
        self._terms: BoundedLRUDict[tuple[TraceVariant, ...], frozenset[int]] = BoundedLRUDict(_MAX_CACHED)
        self._sums: BoundedLRUDict[tuple[TraceVariant, ...], frozenset[int]] = BoundedLRUDict(_MAX_CACHED)
        self._replays: BoundedLRUDict[TraceVariant, DenominatorReplay] = BoundedLRUDict(_MAX_CACHED)
        self._even: BoundedLRUDict[tuple[TraceVariant, ...], _EvenCounts] = BoundedLRUDict(_MAX_CACHED)

    def of(self, call: Call, given: Microbatches) -> MeanWeights:
        """The weights of operations that average, by microbatch and node; empty where all weigh by samples."""
        variants, batch, weights, graph = given.variants, given.batch, given.weights, given.graph
        terms = self._terms_of(variants) if len(variants) > 1 else frozenset()
        if not terms:
            return ()
        key = tuple(variants)
        even = self._even.get(key)
        state = self._traces.attributes_around_units(variants[0])
        if even is not None and even.state == state and not _contains_any(batch, even.ignored):
            return ()
        labels: list[dict[int, int]] = []
        counted = self._counted(call, list(zip(variants, given.parts, strict=True)), labels=labels)
        if counted is None:
            return ()
        ignored = frozenset(one for each in labels for one in each.values())
        is_even = all(terms <= each.keys() for each in labels) and _have_even_counts(terms, counted, weights)
        if is_even and not any(_may_change(each, terms) for each in variants) and not _contains_any(batch, ignored):
            self._even[key] = _EvenCounts(state, ignored)
        divisors = self._full_batch_divisors(call, given, {n for n in terms if graph.nodes[n].averages == "divisor"})
        # A factor that differs between microbatches belongs to no mean.
        products = [n.index for n in graph.nodes if n.averages in ("product", "divisor") and n.index not in divisors]
        factors = {n: {counts.get(n) for counts in counted} for n in products}
        uneven = {n for n, each in factors.items() if len(each) > 1 or None in each}
        self_weighted = {n for n in terms if uneven & reached_by(n, graph)}
        shares: list[dict[int, Share]] = [{} for _ in variants]
        for term in terms:
            parts = [found.get(term) for found in counted]
            counts = [part for part in parts if part is not None]
            divides = graph.nodes[term].averages == "divisor"
            if len(counts) < len(parts) or (divides and (term not in divisors or term in self_weighted)):
                is_unknown = term not in self_weighted and _are_uneven(counts, weights)
                self.unknown = self.unknown or (graph.nodes[term].line if is_unknown else "")
                continue
            total = divisors.get(term, sum(counts))
            if not total or any(weight == 0 for weight in weights):
                continue
            made = [Share(count / total / of, total * of) for count, of in zip(counts, weights, strict=True)]
            for by_node, share in zip(shares, made, strict=True):
                if term in self_weighted:  # the step itself weighs it, unless it is a mean over no element
                    by_node |= {} if share.factor else {term: share}
                elif any(abs(each.factor - 1) > _EQUAL for each in made):
                    by_node[term] = share
        return shares

    def recorded_terms(self, call: Call, given: Microbatches) -> frozenset[int]:
        """The nodes whose means over data-dependent counts are weighted by these."""
        terms, graph = self._terms_of(given.variants), given.graph
        divisions = {node for node in terms if graph.nodes[node].averages == "divisor"}
        return terms - divisions | self._divided_sums(call, given, divisions)[1]

    def weighs(self, call: Call, given: Microbatches) -> bool:
        """Whether losses of microbatches may weigh by another count than samples."""
        shares, graph = self.of(call, given), given.graph
        if any(shares):
            return any(leads_to_loss(term, graph) for term in frozenset[int]().union(*shares))
        if not any(leads_to_loss(term, graph) for term in self._terms_of(given.variants)):
            return False
        even = self._even.get(tuple(given.variants))
        return _contains_any(given.batch, _IGNORED if even is None else even.ignored)

    def compare_halves(
        self, call: Call, splitter: BatchSplitter | None, note: Callable[[Exception], object]
    ) -> list[ComparedLoss]:
        """Compare the loss of a batch with its halves' loss, of even and uneven sizes."""
        found = []
        for some in (
            call.batch,
            without_last_sample(call.batch),
        ):  # halves of both have the size of a recorded microbatch
            try:
                parts, weights = split(some, 2, splitter)
                variants = self._traces.choose(call, parts)
                compared = self._compare(call, Microbatches(some, call.number, parts, weights, variants))
            except Exception as error:  # the step needs more samples, or more memory than there is
                note(error)
                continue
            found += [] if compared is None else [compared]
        return found

    def _compare(self, call: Call, given: Microbatches) -> ComparedLoss | None:
        """The loss of a batch, and of its weighted microbatches; None if the step draws random numbers.

        The step runs in training mode without dropout, on this rank alone, which has all layers; its effects are
        undone.
        """
        shares = self.of(call, given) or [{} for _ in given.parts]
        root, names, totals = self._plan.root, self._plan.names(), [0.0, 0.0]
        logs, means = LogCapture(1), LogCapture(len(given))
        with undone_runs(root, self._plan.randomness) as runs:
            with torch.no_grad(), call.context(), logs.microbatch(root, 0):
                full = find_loss(call.on(copied_batch(given.batch))())
                dtype = rounded_as(full)
            if not runs.undo():
                return None
            for index, (variant, part, weight) in enumerate(
                zip(given.variants, given.parts, given.weights, strict=True)
            ):
                replay = _as_one_stage(variant, self._plan)
                losses = list[float]()
                for of_means in (shares[index], {}) if shares[index] else ({},):
                    captured = nullcontext() if losses else means.microbatch(root, index)
                    with call.dry_run(self._plan, [replay], index) as current, captured:
                        run = replay.run(call.on(copied_batch(part)), {}, names, current, of_means)
                    losses.append(weight * float(run.made[variant.loss].detach()))
                    runs.undo()
                totals = [totals[0] + losses[0], totals[1] + losses[-1]]
        logged = {key: entry.values[0] for key, entry in keyed(logs.entries()) if entry.values[0]}  # 0 shows nothing
        joined = {key: entry.combine(given.weights, given.sizes, "mean") for key, entry in keyed(means.entries())}
        same = frozenset(key for key in logged.keys() & joined.keys() if is_same(logged[key], joined[key], dtype))
        return ComparedLoss(float(full), totals[0], totals[1], dtype, same)

    def are_incomparable(self, variants: Sequence[TraceVariant]) -> bool:
        """Whether microbatches run different operations, and some average over a data-dependent count."""
        graphs = (variant.assignment.graph for variant in dict.fromkeys(variants))
        return differ(variants) and any(data_dependent_means(graph, sizes_differ=False) for graph in graphs)

    def _terms_of(self, variants: Sequence[TraceVariant]) -> frozenset[int]:
        key = tuple(dict.fromkeys(variants))
        if key not in self._terms:
            graph, sizes_differ = key[0].assignment.graph, len(key) > 1
            self._terms[key] = frozenset() if differ(key) else data_dependent_means(graph, sizes_differ=sizes_differ)
        return self._terms[key]

    def _full_batch_divisors(self, call: Call, given: Microbatches, divisions: set[int]) -> Mapping[int, float]:
        """The divisors of sums over samples in the full batch, by node."""
        full, sums = self._divided_sums(call, given, divisions)
        counted = self._counted(call, [(full, given.batch)]) if full is not None and sums else None
        return {} if counted is None else {n: count for n, count in counted[0].items() if n in sums}

    def _divided_sums(
        self, call: Call, given: Microbatches, divisions: set[int]
    ) -> tuple[TraceVariant | None, frozenset[int]]:
        """The trace of the full batch, and the nodes among ``divisions`` that divide a sum over its samples."""
        full = self._traces.trace_of_full_batch(call, given.batch) if divisions else None
        if full is None:
            return None, frozenset()
        key = (given.variants[0], full)
        if key not in self._sums:
            self._sums[key] = _sums(given.graph, full.assignment.graph, divisions)
        return full, self._sums[key]

    def _counted(
        self,
        call: Call,
        parts: Sequence[tuple[TraceVariant, Any]],
        *,
        labels: list[dict[int, int]] | None = None,
    ) -> list[dict[int, float]] | None:
        """The counts of each microbatch, by node; None if the step cannot run without the model's arithmetic."""
        inside = {module for unit in self._plan.units.values() for module in unit.modules()}
        start = ModuleSnapshot(self._plan.root, without=inside, unhooked=inside)
        names = self._plan.names()
        counted = []
        try:
            for index, (variant, part) in enumerate(parts):
                replay = self._replay(variant)
                with (
                    self._traces.copy_for_dry_run(call, part) as copied,
                    call.dry_run(self._plan, [replay], index) as current,
                ):
                    replay.elements = BatchElements(copied)
                    replay.run(call.on(copied), {}, names, current)
                counted.append(replay.counts)
                if labels is not None:
                    labels.append(dict(replay.labels))
        except Exception:  # an error of the step is raised where it runs
            return None
        finally:
            start.restore()
        flat = [count for counts in counted for count in counts.values()]
        numbers = iter(read_numbers([_unmarked(count) for count in flat]))
        return [{node: next(numbers) for node in counts} for counts in counted]

    def _replay(self, variant: TraceVariant) -> DenominatorReplay:
        if variant not in self._replays:
            given = variant.recording, variant.assignment, self._plan.root, self._plan.randomness
            self._replays[variant] = DenominatorReplay(*given)
        return self._replays[variant]


def _as_one_stage(variant: TraceVariant, plan: StagePlan) -> StageReplay:
    """A replay of all stages of a trace as one."""
    given = variant.assignment
    nodes, values = (0,) * len(given.node_stage), (0,) * len(given.value_stage)
    one = replace(given, num_stages=1, node_stage=nodes, value_stage=values, portals={})
    return StageReplay(variant.recording, one, plan.root, plan.randomness, stage=0)


def _have_even_counts(terms: frozenset[int], counted: Sequence[Mapping[int, float]], weights: Sequence[float]) -> bool:
    """Whether all means are over equally many labels of each sample."""
    return all(
        abs(each[term] * weights[0] - counted[0][term] * weight) < _EQUAL * counted[0][term]
        for each, weight in zip(counted, weights, strict=True)
        for term in terms
    )


def _are_uneven(counts: Sequence[float], weights: Sequence[float]) -> bool:
    """Whether microbatches have other shares of their counts than of the samples."""
    total = sum(counts)
    return any(
        abs(count - weight * total) > _EQUAL * abs(total) for count, weight in zip(counts, weights, strict=False)
    )


def _may_change(variant: TraceVariant, terms: frozenset[int]) -> bool:
    """Whether the step may have other counts with a batch of the same shapes."""
    graph = variant.assignment.graph
    dynamic = any(graph.values[value].dynamic for term in terms for value in graph.nodes[term].inputs)
    return dynamic or bool(variant.recording.unguarded_state)


def _contains_any(batch: Any, numbers: Collection[int]) -> bool:
    """Whether any of these numbers is in the integer tensors of a batch."""
    matches = [
        (tensor == number).any()
        for tensor in tensors_inside(batch)
        if not (tensor.is_floating_point() or tensor.is_complex())
        for number in numbers
    ]
    return bool(torch.stack(matches).any()) if matches else False


def _unmarked(count: Tensor | float) -> Tensor | float:
    return as_plain_tensor(count).detach() if isinstance(count, Tensor) else float(count)


def _sums(part: StepGraph, full: StepGraph, divisions: set[int]) -> frozenset[int]:
    """The nodes among ``divisions`` that divide a sum over the samples."""
    if [node.name for node in part.nodes] != [node.name for node in full.nodes]:
        return frozenset()
    pairs = matching_values(part, full)
    return frozenset(node for node in divisions if is_sum_over_samples(full.nodes[node].inputs[0], part, full, pairs))


class DenominatorReplay(StageReplay):
    """A stage without operations; counts the elements, rows or labels of each mean."""

    counts: dict[int, Tensor | float]  # denominators of the latest run, by node index
    labels: dict[int, int]  # the ignored label, by index of the nodes whose labels are elements of the batch
    elements: BatchElements  # of the batch; set before a run

    def watch(self, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> ReplayWatch:
        """Create a function mode that counts; ``received`` are tensors of other stages by index, of any shapes."""
        return _DenominatorWatch(self, received, parameters)


class _DenominatorWatch(ReplayWatch):
    """Skips every event, and counts before."""

    def __init__(self, replay: DenominatorReplay, *rest: Any) -> None:
        super().__init__(replay, *rest)
        self._replay: DenominatorReplay = replay
        replay.counts, replay.labels = {}, {}
        # Row counts of values whose size depends on the content of the batch.
        self._rows: dict[int, Tensor | float] = {}
        self._call: tuple[Any, Any] = (), {}

    def event(self, name: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]) -> Any:
        self._call = args, kwargs
        out = super().event(name, run, args, kwargs, owned)
        self._replay.elements.follow(name, args, kwargs, out)
        return out

    def _skip(self, node: Node, leaves: list[Any]) -> Any:
        args, kwargs = self._call
        rows: Tensor | float | None = picked_rows(node.name, args, kwargs, self.is_model_value)
        if rows is None:
            rows = next((self._rows[value] for value in node.inputs if value in self._rows), None)
        found = rows if node.averages == "rows" else None
        if node.averages not in ("", "inverse", "sum", "rows"):
            found = count(node.averages, node.name, args, kwargs, self.is_model_value)
        if found is not None:
            self._replay.counts[node.index] = found
        if node.averages == "classes" and (found_labels := labels_of(node.name, args, kwargs)) is not None:
            labels, ignored = found_labels
            if labels in self._replay.elements:
                self._replay.labels[node.index] = ignored
        if rows is not None:
            self._rows.update((value, rows) for value in node.outputs if self.values[value].shape)
        return super()._skip(node, leaves)


_MAX_TRIED = 8  # masks that turned out not to be those of the loss


class LossWeightFinder:
    """Finds the weights of microbatches in the loss of one step.

    Attributes:
        now: The weighting found so far.
    """

    def __init__(self, splitter: BatchSplitter | None, inform: Callable[[str], None]) -> None:
        """Set up for the user's ``splitter`` of batches; ``inform`` prints a message on the first rank."""
        self.now = LossWeighting()
        self._splitter, self._inform = splitter, inform
        self._tried, self._compared = set[Count](), 0

    def is_open(self, batch: Any, count: int) -> bool:
        """Whether a batch can show a weighting that is not known yet."""
        if not self._can_be_split(batch, count):
            return False
        if self.now.undecided and self._compared < _MAX_TRIED:
            return True
        if SAMPLES in self.now.counts and self._compared >= _MAX_TRIED:
            return False
        if self.now.counts:
            return weights_differ(self.now.counts, split(batch, count, self._splitter)[0])
        return len(self._tried) < _MAX_TRIED and bool(self._new_masks(batch, count))

    def watch(self, entries: Sequence[Entry]) -> list[str]:
        """Compare another batch where numbers differ that were undecided so far; the names of these numbers."""
        undecided, found = self.now.undecided, []
        for key, entry in keyed(entries) if undecided else ():
            made = {REDUCTIONS[how](entry.values) for how in undecided.get(key, ()) if how in REDUCTIONS}
            if len(made) > 1:
                found.append(entry.name)
                self._compared = min(self._compared, _MAX_TRIED - 1)
        return found

    def two_parts(self, batch: Any, count: int) -> Any:
        """Two neighbours of ``count`` microbatches, as one batch; a pair with different mask counts if there is one.

        A splitter of the user has no rows to take: then it is one of half as many parts.
        """
        if self._splitter is None and count > 1 and self._can_be_split(batch, count):
            pairs = neighbouring_microbatches(batch, count)
        else:
            pairs = split(batch, max(1, count // 2), self._splitter)[0]
        return next((pair for pair in pairs if self.is_open(pair, 2)), pairs[0])

    def learn(self, found: LossWeighting, batch: Any, count: int) -> None:
        """Adopt the weighting that a batch, split into ``count``, has shown."""
        self._compared += 1
        if self._can_be_split(batch, count):
            self._tried |= self._new_masks(batch, count)
        before = self.now
        if found.mixes:
            self.now = found
        elif found.counts:
            if not self.now.counts:
                self._inform(found.describe(batch))
            self.now = found._replace(counts=tuple(c for c in found.counts if c in self.now.counts) or found.counts)
        elif self._can_be_split(batch, count) and weights_differ(
            self.now.counts, split(batch, count, self._splitter)[0]
        ):
            self.now = self.now._replace(counts=() if SAMPLES in self.now.counts else self.now.counts[:1])
        self.now = self.now._replace(reductions=before.reductions, candidates=before.candidates).with_evidence(found)

    def _can_be_split(self, batch: Any, count: int) -> bool:
        size = batch_size_of(batch)
        return count > 1 and (self._splitter is not None or (size is not None and size >= count))

    def _new_masks(self, batch: Any, count: int) -> set[Count]:
        return uneven_masks(batch, *split(batch, count, self._splitter)) - self._tried
