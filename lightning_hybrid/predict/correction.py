"""`Correction`: the factors and absolute values by which the measured steps of a run correct predictions."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from lightning_hybrid.predict.layout import PlanLayout
from lightning_hybrid.predict.plans import MEMORY_ERROR, TIE, TIME_ERROR, PredictedMemory, PredictedTime

COMMUNICATION = ("replicas", "pipeline messages")
OPTIMIZER = ("optimizer", "host")
# Differences of layouts, as `difference` counts them. A measured run makes predictions of layouts nearer than `NEAR`
# better (`benchmarks/published/correct_by_one_run.py`); a factor that may be the error of one layout ends at `FAR`.
NEAR, FAR = 2.0, 4.0
_SIZES = {"pipeline", "replicate", "shard", "tensor", "context", "expert", "microbatch", "batch"}
OWN_ERROR = 2 * TIME_ERROR  # logarithm of a factor that may be the error of one layout; a larger one is of all layouts


@dataclass(frozen=True)
class LinearCorrection:
    """A predicted value times a factor, and an absolute value."""

    factor: float = 1.0  # of the predicted value
    added: float = 0.0  # seconds of a step, or bytes of a rank, that every layout has besides


@dataclass(frozen=True)
class Correction:
    """What the measured steps of one layout say about all layouts."""

    layout: PlanLayout  # the measured one
    # of the time of layers: all terms but those below, and so the bubble, and collectives in layers
    computation: LinearCorrection
    communication: LinearCorrection  # of the time of messages between stages and of collectives over replicas
    optimizer: LinearCorrection  # of the time of the optimizer's step, "host" if that runs there
    input_seconds: float = 0.0  # of a step, for which ranks wait for their batch
    memory: LinearCorrection | None = None  # of the bytes of tensors; None if they were not measured
    spread: float | None = None  # relative deviation of the measured steps from their median; None if these are too few

    @property
    def unexplained_seconds(self) -> float:
        """Seconds of the measured step that no factor explains, such as gaps between actions; every step has them."""
        return self.computation.added + self.communication.added

    def time(self, predicted: PredictedTime, layout: PlanLayout) -> PredictedTime:
        """Return the corrected seconds of a step of a layout; "input" and "unexplained" are further terms."""
        terms = {}
        for name, seconds in predicted.terms.items():
            if name in OPTIMIZER:
                terms[name] = seconds * self.optimizer.factor
            else:
                part = self.communication if name in COMMUNICATION else self.computation
                terms[name] = seconds * self._factor(part.factor, layout)
        optimizer = next((name for name in OPTIMIZER if name in terms), OPTIMIZER[0])
        terms[optimizer] = terms.get(optimizer, 0.0) + self.optimizer.added
        terms["input"] = self.input_seconds
        terms["unexplained"] = self.unexplained_seconds
        return dataclasses.replace(predicted, seconds=sum(terms.values()), terms=terms)

    def _factor(self, factor: float, layout: PlanLayout) -> float:
        """Return a factor of time for a layout.

        The error of a prediction has a part of all layouts and one of each layout. The larger the factor, the more of
        it is of all; the rest of it becomes 1 as the difference of layouts grows.
        """
        if factor <= 0.0 or factor == 1.0:
            return factor
        own = min(1.0, (OWN_ERROR / math.log(factor)) ** 2)
        return float(factor ** (1.0 - own * self._distance(layout)))

    def bytes(self, predicted: PredictedMemory, layout: PlanLayout) -> PredictedMemory:
        """Return the corrected bytes of each rank of a layout; "unexplained" is a further term.

        A factor below 1 becomes 1 as the difference of layouts grows: memory must not be underestimated.
        """
        if self.memory is None:
            return predicted
        factor, added = self.memory.factor, self.memory.added
        if factor < 1.0:
            factor += (1.0 - factor) * self._distance(layout)
        ranks = []
        for rank in predicted.ranks:
            terms = {name: size * (1.0 if name == "framework" else factor) for name, size in rank.items()}
            ranks.append({**terms, "unexplained": added} if added else terms)
        return dataclasses.replace(predicted, ranks=tuple(ranks))

    def time_error(self, layout: PlanLayout, time: PredictedTime) -> float:
        """Return the relative error bar of a layout's corrected step time.

        That of the measured layout is the spread of its steps, 3 % at least. It grows with the difference of layouts,
        up to that of a prediction, and by the share of the step that no factor explains.
        """
        spread = TIME_ERROR if self.spread is None else self.spread
        unexplained = self._distance(layout) * self.unexplained_seconds / time.seconds
        return max(TIE, spread, self._share_of_error(layout) * TIME_ERROR) + unexplained

    def memory_error(self, layout: PlanLayout) -> float:
        """Return the relative error bar of a layout's memory; 3 % for the measured layout."""
        return MEMORY_ERROR if self.memory is None else max(TIE, MEMORY_ERROR * self._share_of_error(layout))

    def _share_of_error(self, layout: PlanLayout) -> float:
        return min(1.0, math.sqrt(difference(layout, self.layout) / NEAR))

    def _distance(self, layout: PlanLayout) -> float:
        """From 0 for the measured layout to 1 for the layout that the measurement says least about."""
        return min(1.0, difference(layout, self.layout) / FAR)


def difference(layout: PlanLayout, other: PlanLayout) -> float:
    """Return how much two layouts differ: the doublings of each size, 1 for each other option, 1 for other shards."""
    microbatches = ((each.microbatch, each.num_microbatches) for each in (layout, other))
    sizes = zip(
        *((*each.mesh, *of_each) for each, of_each in zip((layout, other), microbatches, strict=True)), strict=True
    )
    doublings = sum(abs(math.log2(size / other_size)) for size, other_size in sizes)
    options = layout.fields.keys() - _SIZES
    differing = sum(layout.fields[name] != other.fields[name] for name in options)
    both_shard = layout.shards("states") and other.shards("states")
    return doublings + differing + (both_shard and layout.shard != other.shard)
