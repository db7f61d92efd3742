"""What a step keeps of the model's numbers and tensors is kept as in one process: once per batch, on every rank.

Each microbatch sees the modules as they were before the batch. After the last one, when the ranks know the numbers,
the step's bookkeeping runs on the whole batch (``step.bookkeeping``), and what that leaves on the modules stays.
Steps that keep nothing of the model cost nothing here. A step that keeps tensors alone need not run on a whole batch:
where it cannot, its lists are joined (``kept``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.pipeline.carried import Carried
from lightning_hybrid.pipeline.choice import Call, VariantChoice
from lightning_hybrid.pipeline.once_more import OnceMore
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.pipeline.returned import EachMicrobatch, Results, completed, is_doubtful
from lightning_hybrid.pipeline.variant import Variant
from lightning_hybrid.step.absent import AbsentFloat, values_behind
from lightning_hybrid.step.absent_content import AbsentArray
from lightning_hybrid.step.bookkeeping import (
    BookkeepingReplay,
    Join,
    alike,
    how_to_join,
    same_operations,
    without_state,
)
from lightning_hybrid.step.microbatch import batch_size_of, copied_batch, sizes_of
from lightning_hybrid.step.numbers_read import RETURNED
from lightning_hybrid.step.picked import OtherRowsPicked, how_to_pick
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.step.recent import Recent
from lightning_hybrid.step.recording import Recording, StepError
from lightning_hybrid.step.replay import StageRun
from lightning_hybrid.step.totals import total_over_samples
from lightning_hybrid.step.transaction import reachable
from lightning_hybrid.step.watch import StepWatch

# Where a step takes ever new ways, or batches come in ever new sizes, those known are forgotten.
_MOST_FORMS = 512


@dataclass(frozen=True)
class _Form:
    """A step on the whole batch.

    Attributes:
        kept: What it keeps, and where.
        replay: Runs its bookkeeping.
        joins: How each value that is kept or read is joined; that of the last microbatch stays where it is not known.
        places: By microbatch, which of its values each of them is.
        without: Modules whose attributes are not its bookkeeping.
    """

    kept: str
    replay: BookkeepingReplay
    joins: Mapping[int, Join | None]
    places: Sequence[Mapping[int, int]]
    without: set[nn.Module]


@dataclass(frozen=True)
class Chosen:
    """What is known of the step on a batch before it runs: its microbatches, their weights and recorded forms.

    Attributes:
        batch: The whole batch.
        number: Of the batch in the run.
        microbatches: Its parts.
        weights: Of the parts.
        variants: The recorded form of each part.
        bookkeeping: How what they keep becomes that of the batch.
    """

    batch: Any
    number: int
    microbatches: Sequence[Any]
    weights: list[float]
    variants: list[Variant]
    bookkeeping: Bookkeeping | EachMicrobatch | None


class WholeBatch:
    """Knows the steps of one module that keep something of the model."""

    def __init__(self, root: nn.Module, plan: StagePlan, choice: VariantChoice, randomness: KeyedRandomness) -> None:
        """Args: root: the user's module. plan: who holds what. choice: of forms. randomness: keys what steps draw."""
        self._root = root
        self._plan = plan
        self._choice = choice
        self._randomness = randomness
        self._forms: Recent[tuple[Variant, ...], _Form] = Recent(_MOST_FORMS)
        self._unfit: Recent[tuple[Variant, ...], None] = Recent(_MOST_FORMS)
        self._doubtful: Recent[tuple[Variant, int | None], bool] = Recent(_MOST_FORMS)
        self._checked: Recent[tuple[Variant, ...], set[nn.Module]] = Recent(_MOST_FORMS)

    def begin(
        self, call: Call, variants: Sequence[Variant], batch: Any, microbatches: Sequence[Any], *, share_output: bool
    ) -> Bookkeeping | EachMicrobatch | None:
        """Before a step: note what its bookkeeping starts from.

        Args:
            call: Of the step.
            variants: The recorded form of each microbatch.
            batch: The whole batch.
            microbatches: Its parts.
            share_output: Whether what the step returns is read.

        Returns:
            None if nothing that the step keeps or returns needs its bookkeeping, or if that is tensors alone and the
            step cannot run on a whole batch.

        Raises:
            StepError: It keeps numbers, and it cannot be known what one process would keep.
        """
        numbers = next((text for variant in variants if (text := variant.recording.numbers_kept)), "")
        tensors = [place for variant in variants for place, _ in variant.recording.kept] if len(variants) > 1 else []
        returned = share_output and len(variants) > 1 and self._returns_doubtful(variants, microbatches)
        parts = tuple(variants)
        if any(place.attribute == "_buffers" for place in tensors):  # microbatches find what the one before has bound
            self._unfit[parts] = None
        if not (numbers or tensors or returned) or (parts in self._unfit and not numbers):
            return None
        kept = numbers or (f"{tensors[0]} keeps a tensor of the model" if tensors else f"{call.name} returns a list")
        in_output_alone = not tensors and all(
            RETURNED in text for variant in variants if (text := variant.recording.numbers_kept)
        )
        if parts in self._unfit:
            return self._each_microbatch(call, variants, batch, microbatches, kept)
        try:
            whole = variants[0]
            if len(variants) > 1:
                (whole,) = self._choice.choose(call, [batch])
            form = self._form_of(call, variants, whole, kept, microbatches[0])
        except OtherRowsPicked:
            raise
        except Exception:  # of the package or of the user's own: the step need not run on a whole batch
            if numbers and (len(variants) == 1 or not in_output_alone):
                raise
            self._unfit[parts] = None
            return self._each_microbatch(call, variants, batch, microbatches, kept) if numbers else None
        give_up = None if numbers or tensors else partial(self._unfit.__setitem__, parts, None)
        return Bookkeeping(self._root, self._plan.names(), form, call, batch, microbatches, give_up)

    def _returns_doubtful(self, variants: Sequence[Variant], microbatches: Sequence[Any]) -> bool:
        for variant, samples in dict.fromkeys(zip(variants, sizes_of(microbatches), strict=True)):
            if (variant, samples) not in self._doubtful:
                self._doubtful[variant, samples] = is_doubtful(variant.recording, samples)
            if self._doubtful[variant, samples]:
                return True
        return False

    def _each_microbatch(
        self, call: Call, variants: Sequence[Variant], batch: Any, microbatches: Sequence[Any], kept: str
    ) -> EachMicrobatch:
        recordings = [variant.recording for variant in variants]
        without = without_state(self._root, recordings)
        again = OnceMore(self._root, self._plan.names(), call, batch, microbatches, kept, without, recordings)
        replays = [self._replay(variant) for variant in variants]
        return EachMicrobatch(again, replays, microbatches)

    def _replay(self, variant: Variant) -> BookkeepingReplay:
        return BookkeepingReplay(variant.recording, variant.assignment, self._root, self._randomness)

    def _form_of(self, call: Call, variants: Sequence[Variant], whole: Variant, kept: str, microbatch: Any) -> _Form:
        key = (whole, *variants)
        if key not in self._forms:
            form = self._form(variants, whole, kept)
            if len(variants) > 1:
                carried = Carried(self._root, form.without, batch_size_of(microbatch))
                batches = microbatch, copied_batch(microbatch)
                twice = self._record_twice(call, variants[0], batches, carried)
                pairs = alike(variants[0].recording.graph, whole.recording.graph)
                carried.refuse(kept, variants[0], pairs, whole, twice)
            self._forms[key] = form
        return self._forms[key]

    def _record_twice(
        self, call: Call, variant: Variant, batches: tuple[Any, Any], carried: Carried
    ) -> Recording | None:
        """What a step does in two batches, one after the other; None where it cannot go on with what it left behind."""

        def both() -> Any:
            with carried.left_by_first():
                call.on(batches[0])
            with carried:
                return call.on(batches[1])

        StepWatch.reads_as = 1.0
        try:
            units = variant.recording.units
            return self._plan.record_once(call.name, both, units, call.context, train=call.train)
        except (StepError, ArithmeticError, ValueError):
            return None
        finally:
            StepWatch.reads_as = None

    def check(self, variants: Sequence[Variant], runs: Iterable[StageRun]) -> None:
        """After a step that keeps no number as it was recorded: see that it does not now.

        Args:
            variants: The recorded form of each microbatch.
            runs: Of the microbatches.

        Raises:
            StepError: It does; on the ranks that do not have the number.
        """
        read_at = next((run.numbers_read for run in runs if run.numbers_read), "")
        if not read_at:
            return
        key = tuple(variants)
        if key not in self._checked:
            self._checked[key] = without_state(self._root, [variant.recording for variant in variants])
        for place, leaf in reachable(self._root, self._checked[key]):
            if values_behind(leaf) is not None or isinstance(leaf, AbsentArray):
                line = leaf.line if isinstance(leaf, AbsentFloat | AbsentArray) else read_at
                raise StepError(
                    f"{line}: {place} keeps a number read from the model, which the step did not when it was recorded:"
                    " keep it in every batch, or keep the tensor instead (loss.detach())"
                )

    def _form(self, variants: Sequence[Variant], whole: Variant, kept: str) -> _Form:
        """How the bookkeeping of a step is done.

        Raises:
            StepError: It cannot be, for these microbatches.
        """
        recording, first = whole.recording, variants[0]
        joins: dict[int, Join | None] = {}
        places: list[dict[int, int]] = []
        if len(variants) > 1:
            if not all(same_operations(variant.recording.graph, recording.graph) for variant in variants):
                raise StepError(
                    f"{kept}, and does other operations on the whole batch than on a microbatch; set num_microbatches=1"
                )
            small, large = first.recording.graph, recording.graph
            places = [alike(variant.recording.graph, large) for variant in variants]
            returned = [v for v in large.returned if v != large.loss and all(v in pairs for pairs in places)]
            graphs = [variant.recording.graph for variant in variants]
            for value in (*large.kept, *returned):
                is_picked, joins[value] = how_to_pick(value, graphs, large, places)
                if not is_picked:
                    joins[value] = how_to_join(value, small, large, places[0])
                elif joins[value] is None and value in large.kept:
                    raise OtherRowsPicked(
                        f"{kept}: rows of the batch that it picks by their numbers, of which a microbatch picks others;"
                        " keep all rows, or the first ones as in out[:8], or set num_microbatches=1"
                    )
            for value in returned:
                if joins[value] is None and value not in large.kept:
                    del joins[value]
            unknown = [value for value in recording.values_read if value in joins and joins[value] is None]
            if unknown:
                described = recording.graph.values[unknown[0]]
                maker = recording.graph.made_by(unknown[0])
                raise StepError(
                    f"{kept}, one that {maker.name} made ({maker.line}; {described.dtype}{list(described.shape)}). What"
                    f" it is for the whole batch cannot be told from {len(variants)} microbatches; floats are averaged"
                    " over the samples, and sums, maxima and minima over samples are known: keep one of these, or set"
                    " num_microbatches=1"
                )
        replays = [recording, *(variant.recording for variant in variants)]
        replay = self._replay(whole)
        if len(variants) > 1:
            totals = {value: total_over_samples(value, small, large, places[0]) for value in joins}
            replay.totals = {value: total for value, total in totals.items() if total is not None and total.bases}
            replay.count = len(variants)
        return _Form(kept, replay, joins, places, without_state(self._root, replays))


class Bookkeeping:
    """That of one step on one batch."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        form: _Form,
        call: Call,
        batch: Any,
        microbatches: Sequence[Any],
        give_up: Callable[[], None] | None,
    ) -> None:
        """Set out.

        Args:
            root: The user's module.
            names: FQN by id of what it holds.
            form: Of its step.
            call: Of the step.
            batch: The whole batch.
            microbatches: What the step runs on.
            give_up: Called where the step cannot run on the whole batch; None if that is an error.
        """
        self._form, self._call, self._batch, self._give_up = form, call, batch, give_up
        recordings = [form.replay.recording]
        self._again = OnceMore(root, names, call, batch, microbatches, form.kept, form.without, recordings)

    def before_microbatch(self) -> None:
        """Each sees the modules as the batch found them."""
        self._again.start_again()

    def finish(self, results: Results) -> Any:
        """After the last microbatch: keep what one process would.

        Args:
            results: Of the microbatches.

        Returns:
            What the step returned, with the numbers of the whole batch.

        Raises:
            StepError: The step cannot run on the whole batch.
        """
        end = None if self._give_up is None else self._again.state()
        try:
            self._again.check_batch()
            joined = self._joined(results.contents, results.weights)
            whole = self._again.run(self._form.replay, self._batch, 0, joined)
        except StepError:
            if self._give_up is None or end is None:
                raise
            end.restore()
            self._give_up()
            return results.joined()
        return completed(results.joined(whole), whole)

    def _joined(self, contents: Sequence[Mapping[int, Tensor]], weights: Sequence[float]) -> dict[int, Tensor]:
        if len(contents) == 1:
            return dict(contents[0])
        total = sum(weights)
        shares = [weight / total if total else 1 / len(weights) for weight in weights]
        joined = {}
        for value, join in self._form.joins.items():
            found = zip(contents, self._form.places, strict=True)
            parts = [known[pairs[value]] for known, pairs in found if pairs.get(value) in known]
            if len(parts) < len(contents):  # what is returned is not asked for
                continue
            joined[value] = parts[-1] if join is None else join(parts, shares)
        return joined
