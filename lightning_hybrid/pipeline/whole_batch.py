"""What a step keeps of the model's numbers and tensors is kept as in one process: once per batch, on every rank.

Each microbatch sees the modules as they were before the batch. After the last one, when the ranks know the numbers,
the step's bookkeeping runs on the whole batch (``step.bookkeeping``), and what that leaves on the modules stays.
Steps that keep nothing of the model cost nothing here. A step that keeps tensors alone need not run on a whole batch:
where it cannot, its lists are joined (``kept``).
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.pipeline.carried import Carried
from lightning_hybrid.pipeline.choice import Call, VariantChoice
from lightning_hybrid.pipeline.executor import Variant, fill_placeholders
from lightning_hybrid.pipeline.logs import replaced_log
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.step.absent import AbsentFloat, is_absent, values_behind
from lightning_hybrid.step.absent_content import AbsentArray
from lightning_hybrid.step.bookkeeping import BookkeepingReplay, Join, how_to_join, without_state
from lightning_hybrid.step.installed import installed
from lightning_hybrid.step.microbatch import batch_size_of
from lightning_hybrid.step.numbers_read import operations
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.step.recording import Recording, StepError
from lightning_hybrid.step.replay import StageRun
from lightning_hybrid.step.transaction import ModuleState, reachable
from lightning_hybrid.step.tree import flatten, map_leaves, tensors_inside, unflatten
from lightning_hybrid.step.watch import StepWatch

# Where a step takes ever new ways, those known are forgotten now and then.
_MOST_FORMS = 512


@dataclass(frozen=True)
class _Form:
    """A step on the whole batch.

    Attributes:
        kept: What it keeps, and where.
        replay: Runs its bookkeeping.
        joins: How each value that is kept or read is joined; that of the last microbatch stays where it is not known.
        without: Modules whose attributes are not its bookkeeping.
    """

    kept: str
    replay: BookkeepingReplay
    joins: Mapping[int, Join | None]
    without: set[nn.Module]


class WholeBatch:
    """Knows the steps of one module that keep something of the model."""

    def __init__(self, root: nn.Module, plan: StagePlan, choice: VariantChoice, randomness: KeyedRandomness) -> None:
        """Args: root: the user's module. plan: who holds what. choice: of forms. randomness: keys what steps draw."""
        self._root = root
        self._plan = plan
        self._choice = choice
        self._randomness = randomness
        self._forms: dict[tuple[Variant, ...], _Form] = {}
        self._unfit: set[tuple[Variant, ...]] = set()
        self._checked: dict[tuple[Variant, ...], set[nn.Module]] = {}

    def begin(self, call: Call, variants: Sequence[Variant], batch: Any, microbatch: Any) -> Bookkeeping | None:
        """Before a step: note what its bookkeeping starts from.

        Args:
            call: Of the step.
            variants: The recorded form of each microbatch.
            batch: The whole batch.
            microbatch: The first microbatch.

        Returns:
            None if the step keeps nothing that must be joined, or tensors alone and cannot run on a whole batch.

        Raises:
            StepError: It keeps numbers, and it cannot be known what one process would keep.
        """
        numbers = next((text for variant in variants if (text := variant.recording.numbers_kept)), "")
        tensors = [place for variant in variants for place, _ in variant.recording.kept] if len(variants) > 1 else []
        parts = tuple(variants)
        if not (numbers or tensors) or parts in self._unfit:
            return None
        kept = numbers or f"{tensors[0]} keeps a tensor of the model"
        try:
            whole = variants[0]
            if len(variants) > 1:
                (whole,) = self._choice.choose(call, [batch])
            form = self._form_of(call, variants, whole, kept, microbatch)
        except Exception:  # of the package or of the user's own: the step need not run on a whole batch
            if numbers:
                raise
            self._unfit.add(parts)
            return None
        return Bookkeeping(self._root, self._plan.names(), form, call, batch)

    def _form_of(self, call: Call, variants: Sequence[Variant], whole: Variant, kept: str, microbatch: Any) -> _Form:
        key = (whole, *variants)
        if key not in self._forms:
            if len(self._forms) > _MOST_FORMS:
                self._forms.clear()
            form = self._form(variants, whole, kept)
            if len(variants) > 1:
                carried = Carried(self._root, form.without, batch_size_of(microbatch))
                batches = microbatch, map_leaves(_copied, microbatch)
                twice = self._record_twice(call, variants[0], batches, carried)
                carried.refuse(kept, variants[0], whole, twice)
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
        if len(variants) > 1:
            if any(_doing(variant) != _doing(whole) for variant in variants):
                raise StepError(
                    f"{kept}, and does other operations on the whole batch than on a microbatch; set num_microbatches=1"
                )
            small, large = first.recording.graph, recording.graph
            joins = {value: how_to_join(value, small, large) for value in large.kept}
            unknown = [value for value in recording.values_read if value in joins and joins[value] is None]
            if unknown:
                described = recording.graph.values[unknown[0]]
                maker = next(node for node in recording.graph.nodes if unknown[0] in node.outputs)
                raise StepError(
                    f"{kept}, one that {maker.name} made ({maker.line}; {described.dtype}{list(described.shape)}). What"
                    f" it is for the whole batch cannot be told from {len(variants)} microbatches; floats are averaged"
                    " over the samples, and sums, maxima and minima over samples are known: keep one of these, or set"
                    " num_microbatches=1"
                )
        replay = BookkeepingReplay(recording, whole.assignment, self._root, self._randomness)
        replays = [recording, *(variant.recording for variant in variants)]
        return _Form(kept, replay, joins, without_state(self._root, replays))


def _doing(variant: Variant) -> Any:
    return operations(variant.recording), variant.recording.graph.kept


class Bookkeeping:
    """That of one step on one batch."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        form: _Form,
        call: Call,
        batch: Any,
    ) -> None:
        """Args: root: the user's module. names: FQN by id of what it holds. form: of its step. Others as ``begin``."""
        self._root, self._names, self._form = root, names, form
        self._call, self._batch = call, batch
        self._start = ModuleState(root, buffers=False, without=form.without)
        self._versions = [tensor._version for tensor in tensors_inside(batch)]

    def before_microbatch(self) -> None:
        """Each sees the modules as the batch found them."""
        self._start.restore()

    def finish(self, contents: Sequence[Mapping[int, Tensor]], weights: Sequence[float], output: Any) -> Any:
        """After the last microbatch: keep what one process would.

        Args:
            contents: By microbatch, the shared values by index.
            weights: Of the microbatches.
            output: What the step returned, joined.

        Returns:
            The same, with the numbers of the whole batch.

        Raises:
            StepError: The step cannot run on the whole batch.
        """
        if [tensor._version for tensor in tensors_inside(self._batch)] != self._versions:
            raise StepError(f"{self._form.kept}, and the step writes into its batch in place; let it write into a copy")
        joined = self._joined(contents, weights)
        replay, randomness = self._form.replay, self._form.replay.randomness
        self._start.restore()
        buffers = _Buffers(self._root, self._form.without)
        replay.contents = joined
        try:
            with (
                installed([replay], randomness) as current,
                randomness.isolated(),
                randomness.microbatch(self._call.number, self._call.first),
                self._call.context(),
                replaced_log(self._root, lambda *_, **__: None),
                contextlib.redirect_stdout(io.StringIO()),  # the microbatches have printed
            ):
                run = replay.run(lambda: self._call.on(self._batch), {}, self._names, current)
        except Exception as error:
            raise StepError(
                f"{self._form.kept}, and the step failed on the whole batch where only what it keeps is computed"
                f" ({type(error).__name__}: {error}); set num_microbatches=1"
            ) from error
        finally:
            replay.contents = {}
            buffers.restore()
        fill_placeholders(run, joined)
        return _completed(output, run.result)

    def _joined(self, contents: Sequence[Mapping[int, Tensor]], weights: Sequence[float]) -> dict[int, Tensor]:
        if len(contents) == 1:
            return dict(contents[0])
        total = sum(weights)
        shares = [weight / total if total else 1 / len(weights) for weight in weights]
        joined = {}
        for value, join in self._form.joins.items():
            parts = [known[value] for known in contents]
            joined[value] = parts[-1] if join is None else join(parts, shares)
        return joined


class _Buffers:
    """The buffers that glue may write; the microbatches have done that."""

    def __init__(self, root: nn.Module, without: set[nn.Module]) -> None:
        passed = {id(module) for module in without}
        holders = [module._buffers for module in root.modules() if id(module) not in passed]
        self._holders = [(holder, dict(holder)) for holder in holders]
        held = {id(b): b for holder in holders for b in holder.values() if b is not None and not is_absent(b)}
        self._contents = [(b, b.detach().clone(), b._version) for b in held.values()]

    def restore(self) -> None:
        """Put them back as they were."""
        for holder, members in self._holders:
            holder.clear()
            holder.update(members)
        for buffer, content, version in self._contents:
            if buffer._version != version:
                buffer.detach().copy_(content)


def _completed(output: Any, result: Any) -> Any:
    """A joined output with those leaves that the whole batch gave; the other tensors were not asked for there."""
    if isinstance(result, Tensor):
        return output
    leaves, spec = flatten(output)
    whole = flatten(result)[0]
    if len(leaves) != len(whole):
        return output
    return unflatten([o if is_absent(w) else _plain(w) for o, w in zip(leaves, whole, strict=True)], spec)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
