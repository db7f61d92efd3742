"""Microbatch weights of the means that a recorded step takes over labels or masks of the batch.

The counts must be known before the first backward, so the step runs on each microbatch beforehand, without the model's
arithmetic; only steps with such a mean pay for that, and not where all labels are the batch's own and none is ignored.
Where a sum is divided by a number made of the batch, it runs so
on the whole batch too: the number of the batch need not be the sum of the microbatches' (``count.clamp(min=1)``).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.trace_cache import Call, VariantChoice
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch_means.linear_terms import leads_to_loss, reached_by, terms_of
from lightning_hybrid.step.batch_means.mean_ops import Share
from lightning_hybrid.step.batch_means.sums_over_samples import alike, is_total_over_samples
from lightning_hybrid.step.instrument.instrument import installed
from lightning_hybrid.step.module_state.snapshot import ModuleState
from lightning_hybrid.step.objects.lru_cache import Recent
from lightning_hybrid.step.objects.pytree import memory_of, tensors_inside
from lightning_hybrid.step.replay.counting_replay import CountingReplay

_MOST_FORMS = 512
_EQUAL = 1e-12
_IGNORED = frozenset({-100})  # torch's own number of what does not count

Shares = Sequence[Mapping[int, Share]]


@dataclass(frozen=True)
class _EvenLabels:
    """Where each microbatch counts its labels, if none is ignored.

    Attributes:
        state: Of the modules around units when that was seen.
        ignored: The labels that would not count.
    """

    state: list[Any]
    ignored: frozenset[int]


class LossShares:
    """Knows them for the steps of one module."""

    def __init__(self, root: nn.Module, plan: StagePlan, choice: VariantChoice, randomness: KeyedRandomness) -> None:
        """Args: root: the user's module. plan: who holds what. choice: of forms. randomness: keys what steps draw."""
        self._root, self._plan, self._choice, self._randomness = root, plan, choice, randomness
        self._terms: Recent[tuple[Variant, ...], frozenset[int]] = Recent(_MOST_FORMS)
        self._sums: Recent[tuple[Variant, ...], frozenset[int]] = Recent(_MOST_FORMS)
        self._replays: Recent[Variant, CountingReplay] = Recent(_MOST_FORMS)
        self._even: Recent[tuple[Variant, ...], _EvenLabels] = Recent(_MOST_FORMS)

    def of(
        self,
        call: Call,
        variants: Sequence[Variant],
        batch: Any,
        microbatches: Sequence[Any],
        weights: Sequence[float],
    ) -> Shares:
        """By microbatch, how the operations that average weigh, by node.

        Args:
            call: Of the step.
            variants: The recorded form of each microbatch.
            batch: The whole batch.
            microbatches: Its parts.
            weights: By which everything else is averaged.
        """
        terms = self._terms_of(variants) if len(variants) > 1 else frozenset()
        if not terms:
            return ()
        graph = variants[0].assignment.graph
        forms = tuple(variants)
        even = self._even.get(forms)
        state = self._choice.state_around(variants[0])
        if even is not None and even.state == state and not _holds(batch, even.ignored):
            return ()
        labels: list[dict[int, tuple[int, int]]] = []
        found = self._counted(call, list(zip(variants, microbatches, strict=True)), labels=labels)
        if found is None:
            return ()
        if _are_even(terms, labels, weights) and not any(_is_unsettled(variant, terms) for variant in variants):
            ignored = frozenset(one for each in labels for _, one in each.values())
            self._even[forms] = _EvenLabels(state, ignored)
        whole = self._of_sums(call, variants, batch, {n for n in terms if graph.nodes[n].averages == "divisor"})
        # A factor that is another one in each microbatch belongs to no mean.
        products = [n.index for n in graph.nodes if n.averages in ("product", "divisor") and n.index not in whole]
        factors = {n: {counts.get(n) for counts in found} for n in products}
        uneven = {n for n, each in factors.items() if len(each) > 1 or None in each}
        spoilt = {n for n in terms if uneven & reached_by(n, graph)}
        shares: list[dict[int, Share]] = [{} for _ in variants]
        for term in terms:
            parts = [counts.get(term) for counts in found]
            counts = [part for part in parts if part is not None]
            divides = graph.nodes[term].averages == "divisor"
            if len(counts) < len(parts) or (divides and (term not in whole or term in spoilt)):
                continue
            total = whole.get(term, sum(counts))
            if not total or any(weight == 0 for weight in weights):
                continue
            made = [
                Share(count / total / weight, total * weight) for count, weight in zip(counts, weights, strict=True)
            ]
            for place, share in zip(shares, made, strict=True):
                if term in spoilt:  # weighed by the step itself, where it is no mean of nothing
                    place |= {} if share.factor else {term: share}
                elif any(abs(each.factor - 1) > _EQUAL for each in made):
                    place[term] = share
        return shares

    def weighs(
        self, call: Call, variants: Sequence[Variant], batch: Any, microbatches: Sequence[Any], weights: Sequence[float]
    ) -> bool:
        """Whether losses of microbatches weigh by other numbers than samples, or may; arguments as for ``of``."""
        shares = self.of(call, variants, batch, microbatches, weights)
        graph = variants[0].assignment.graph
        if any(shares):
            return any(leads_to_loss(term, graph) for term in frozenset[int]().union(*shares))
        even = self._even.get(tuple(variants))
        return _holds(batch, _IGNORED if even is None else even.ignored)

    def weights_of_terms(
        self, call: Call, variants: Sequence[Variant], batch: Any, microbatches: Sequence[Any], weights: Sequence[float]
    ) -> list[list[float]]:
        """The weights of microbatches by samples, and by each term of the loss; arguments as for ``of``."""
        graph = variants[0].assignment.graph
        shares = self.of(call, variants, batch, microbatches, weights)
        terms = [term for term in frozenset[int]().union(*shares) if leads_to_loss(term, graph)]
        return [
            list(weights),
            *(
                [weight * (of[term].factor if term in of else 1.0) for weight, of in zip(weights, shares, strict=True)]
                for term in terms
            ),
        ]

    def are_incomparable(self, variants: Sequence[Variant]) -> bool:
        """Whether microbatches do different operations, and some average over what the content of the batch decides."""
        graphs = [variant.assignment.graph for variant in dict.fromkeys(variants)]
        unlike = any(_operations(graph) != _operations(graphs[0]) for graph in graphs[1:])
        return unlike and any(terms_of(graph, sizes_differ=False) for graph in graphs)

    def _terms_of(self, variants: Sequence[Variant]) -> frozenset[int]:
        key = tuple(dict.fromkeys(variants))
        if key not in self._terms:
            graphs = [variant.assignment.graph for variant in key]
            alike_all = all(_operations(graph) == _operations(graphs[0]) for graph in graphs[1:])
            self._terms[key] = terms_of(graphs[0], sizes_differ=len(graphs) > 1) if alike_all else frozenset()
        return self._terms[key]

    def _of_sums(self, call: Call, variants: Sequence[Variant], batch: Any, divisions: set[int]) -> Mapping[int, float]:
        """What sums over samples are divided by in the whole batch, by node."""
        if not divisions:
            return {}
        try:
            (whole,) = self._choice.choose(call, [batch])
        except Exception:  # the step need not run on a whole batch
            return {}
        key = (variants[0], whole)
        if key not in self._sums:
            self._sums[key] = _sums(variants[0].assignment.graph, whole.assignment.graph, divisions)
        if not self._sums[key]:
            return {}
        found = self._counted(call, [(whole, batch)])
        return {} if found is None else {n: count for n, count in found[0].items() if n in self._sums[key]}

    def _counted(
        self,
        call: Call,
        parts: Sequence[tuple[Variant, Any]],
        *,
        labels: list[dict[int, tuple[int, int]]] | None = None,
    ) -> list[dict[int, float]] | None:
        """What each microbatch counts, by node; None if the step cannot run without the model's arithmetic."""
        inside = {part for unit in self._plan.units().values() for part in unit.modules()}
        start = ModuleState(self._root, without=inside, unhooked=inside)
        names = self._plan.names()
        counted = []
        try:
            for place, (variant, part) in enumerate(parts):
                replay = self._replay(variant)
                with (
                    self._choice.copy_for_rehearsal(call, part) as copied,
                    installed([replay], self._randomness) as current,
                    self._randomness.isolated(),
                    self._randomness.microbatch(call.number, call.first + place),
                    self._quiet(call),
                ):
                    replay.memory = frozenset(memory_of(tensor) for tensor in tensors_inside(copied))
                    replay.run(partial(call.on, copied), {}, names, current)
                counted.append(replay.counts)
                if labels is not None:
                    labels.append(dict(replay.labels))
        except Exception:  # what is wrong with the step is told where it runs
            return None
        finally:
            start.restore()
        flat = [count for counts in counted for count in counts.values()]
        numbers = iter(torch.stack([_number(count) for count in flat]).tolist() if flat else ())
        return [{node: next(numbers) for node in counts} for counts in counted]

    @contextlib.contextmanager
    def _quiet(self, call: Call) -> Iterator[None]:
        grad = torch.set_grad_enabled(call.train or torch.is_grad_enabled())
        silent = replaced(self._root, "log", lambda *_, **__: None)
        with grad, call.context(), silent, contextlib.redirect_stdout(io.StringIO()):
            yield

    def _replay(self, variant: Variant) -> CountingReplay:
        if variant not in self._replays:
            self._replays[variant] = CountingReplay(variant.recording, variant.assignment, self._root, self._randomness)
        return self._replays[variant]


def _are_even(terms: frozenset[int], labels: Sequence[Mapping[int, tuple[int, int]]], weights: Sequence[float]) -> bool:
    """Whether all means are over labels of the batch itself, of which each sample has as many."""
    return all(
        all(term in each for each in labels)
        and all(
            abs(each[term][0] * weights[0] - labels[0][term][0] * weight) < _EQUAL * labels[0][term][0]
            for each, weight in zip(labels, weights, strict=True)
        )
        for term in terms
    )


def _is_unsettled(variant: Variant, terms: frozenset[int]) -> bool:
    """Whether the step may do something else with a batch of the same shapes."""
    graph = variant.assignment.graph
    dynamic = any(graph.values[value].dynamic for term in terms for value in graph.nodes[term].inputs)
    return dynamic or bool(variant.recording.looks_at)


def _holds(batch: Any, numbers: Collection[int]) -> bool:
    """Whether any of some numbers is in the whole numbers of a batch."""
    found = [
        (tensor == number).any()
        for tensor in tensors_inside(batch)
        if not (tensor.is_floating_point() or tensor.is_complex())
        for number in numbers
    ]
    return bool(torch.stack(found).any()) if found else False


def _number(count: Tensor | float) -> Tensor:
    return torch.as_tensor(count).detach().double().cpu().reshape(())


def _operations(graph: StepGraph) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(node.name, node.inputs, node.outputs) for node in graph.nodes]


def _sums(part: StepGraph, whole: StepGraph, divisions: set[int]) -> frozenset[int]:
    """Which of these divide a sum over the samples."""
    if [node.name for node in part.nodes] != [node.name for node in whole.nodes]:
        return frozenset()
    pairs = alike(part, whole)
    return frozenset(
        node for node in divisions if is_total_over_samples(whole.nodes[node].inputs[0], part, whole, pairs)
    )
