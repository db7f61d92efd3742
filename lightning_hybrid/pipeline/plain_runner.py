"""The step runner for one pipeline stage: plain Python on real values, microbatch by microbatch.

Nothing is recorded and nothing replayed: a step may branch on values, change from batch to batch, and read what it
likes. What ranks share of a layer (parameters, positions, experts, recomputation) hangs on the layer's forward. A batch
is split into microbatches, each of which runs forward and backward before the next one; gradients add up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.batch_shares import BRANCHES, LEAVES, Given, Part, Shares
from lightning_hybrid.pipeline.loss_weights.found_counts import LossWeighing
from lightning_hybrid.pipeline.loss_weights.mixed_objectives import describe_mixing, weighing_of
from lightning_hybrid.pipeline.microbatch_runner import MicrobatchRunner, StepResult, TrainContext, backward_of
from lightning_hybrid.pipeline.plain_step_randomness import StepDraws
from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.results.metric_sync import MetricSync
from lightning_hybrid.pipeline.results.step_outputs import detached
from lightning_hybrid.pipeline.runtime.step_rollback import StepStart
from lightning_hybrid.pipeline.side_effects.appended_entries import AppendedEntries
from lightning_hybrid.pipeline.side_effects.module_changes import LeftBehind
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.pipeline.unpartitioned_steps import UncutSteps
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.schedule import Action, Kind, Span
from lightning_hybrid.step.batch.microbatch import BatchSplitter, batch_size_of, check_count, sizes_of, split, why_whole
from lightning_hybrid.step.instrument.instrument import slow_attention
from lightning_hybrid.step.module_state.attribute_tensors import put
from lightning_hybrid.step.module_state.snapshot import reachable
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.objects.repeated_layers import find_layers
from lightning_hybrid.step.recording.choose_units import choose_units
from lightning_hybrid.step.standins.deferred_tensors import Deferred, whole_of
from lightning_hybrid.step.standins.guessed_reads import GUESSES
from lightning_hybrid.step.tracing.call_trace import CodePath, calls_of
from lightning_hybrid.step.tracing.compiled_modules import Uncompiled, compiled_around

_MOST_SMALL = 3  # after so many batches that cannot be split, none is expected to be


class PlainRunner(MicrobatchRunner):
    """Runs any step of one module whose layers are all on this rank, in full or in shards.

    Attributes:
        joins_results: Whether layers may hand on results in shards.
        is_undecided: Whether no training batch has been compared with its parts yet.
        has_left_rows: Whether training steps have left tensors on their modules that may have a row per sample.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: StagePlan,
        randomness: KeyedRandomness,
        *,
        num_microbatches: int | None,
        splitter: BatchSplitter | None,
        replica: int,
        metrics: MetricSync,
        uncut: UncutSteps,
        shares: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        tell: Callable[[str], None],
        inform: Callable[[str], None],
    ) -> None:
        """Prepare to run steps.

        Args:
            root: The user's module.
            plan: Of one stage.
            randomness: Keys what steps draw.
            num_microbatches: The user's; None chooses.
            splitter: Of the user, for batches.
            replica: This rank's data rank.
            metrics: Of the module.
            uncut: As for ``MicrobatchRunner``.
            shares: The ranks that share the batches of a replica.
            everyone: These with those of other replicas.
            tell: Warns the user, on the first rank.
            inform: Tells the user what is no fault.
        """
        super().__init__(plan, num_microbatches=num_microbatches, splitter=splitter, uncut=uncut)
        self._root, self._randomness, self._replica, self._metrics = root, randomness, replica, metrics
        self.joins_results = self.has_left_rows = False
        layers = find_layers(choose_units(root, 1))
        self._uncompiled, self._compiled_around = Uncompiled(), bool(compiled_around(root, layers.values()))
        self._shares, self._tell = Shares(shares, everyone), tell
        self._leaves: bool | None = None  # whether training steps leave something of a batch; not known at first
        self._left: LeftBehind | None = None  # by the first training batch
        self._calls = set[int]()  # lines of code that training steps have run when their batches were compared
        self._num_small = 0  # batches that could not be compared with parts
        self._weighing = LossWeighing(splitter, inform)
        self.is_undecided = True
        self._draws = StepDraws(root, randomness, self.guards)

    @property
    def may_share(self) -> bool:
        """Whether there are ranks to share batches with."""
        return self._shares.size > 1

    @property
    def is_shared(self) -> bool:
        """Whether training steps run on shares of a batch: only once they have left nothing of it on their modules."""
        return self.may_share and self._leaves is False

    @property
    def may_undo(self) -> bool:
        """Whether a training step may turn out to leave something of its share."""
        return self.is_shared

    def record(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Let those who plan layers look at the step on stand-ins, with several answers to what it may decide by.

        What none of these runs shows is not planned: such layers stay full. So their errors do not matter.
        """
        once = self._on_microbatch(name, step, args)
        variant = self._seen(name, once, context)
        if isinstance(variant, Exception):
            return
        with contextlib.ExitStack() as watching:
            for watch in self.watching_units:
                watching.enter_context(watch(variant))
            for guesses in GUESSES:
                with contextlib.suppress(Exception):
                    units = variant.recording.units
                    self.plan.record_once(name, once, units, context, train=False, guesses=guesses)

    def why_not_seen(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Exception | None:
        """Why a look at the step shows nothing, whatever it decides; arguments as for ``record``."""
        seen = self._seen(name, self._on_microbatch(name, step, args), context)
        return seen if isinstance(seen, Exception) else None

    def _on_microbatch(self, name: str, step: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
        batch, *rest = args
        return partial(step, split(batch, self.count(name, batch), self.splitter)[0][0], *rest)

    def _seen(
        self, name: str, step: Callable[[], Any], context: Callable[[], AbstractContextManager[Any]]
    ) -> Variant | Exception:
        """The step recorded with the first answers with which that can be done; the last error if it cannot."""
        found: Variant | Exception
        for guesses in GUESSES:
            try:
                return self.plan.variant(name, step, context, train=False, guesses=guesses)
            except Exception as error:
                found = error
        return found

    def count(self, name: str, batch: Any) -> int:
        """Number of microbatches: what needs no backward runs on the whole batch."""
        if name != "training_step":
            return 1
        if name not in self._full:
            check_count(batch, self._wanted)
            if (self._wanted or 1) > 1 and (reason := why_whole(batch, self.splitter)):
                self._full[name] = 1, 1
                self._tell(
                    f"num_microbatches={self._wanted}, but the batch cannot be split: {reason}; it runs whole. Pass"
                    " batch_splitter=function(batch, count) -> list of batches"
                )
        return super().count(name, batch)

    def run_whole(self) -> None:
        """Ranks that could share batches run all of them, whatever the first one shows."""
        if self._shares.size > 1:
            self._leaves, self.is_undecided = True, False

    def num_backwards(self, batch: Any) -> int:
        """Backwards of a training step on this rank."""
        if self._shares.size > 1 and not self.is_shared:
            return 1
        return self._shares.count(batch, self.count("training_step", batch), self.splitter) or 1

    def run(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        *,
        step_number: int,
        context: Callable[[], AbstractContextManager[Any]],
        train: TrainContext | None = None,
        share_output: bool = True,
        by_hand: bool = False,
    ) -> StepResult:
        """Run one step of the user's module on a whole batch; see ``MicrobatchRunner``."""
        batch, *rest = args
        trains = train is not None or by_hand
        part = self._part(batch, 1 if by_hand else self.count(name, batch), trains=trains, by_hand=by_hand)
        microbatches, weights, loss_weights = part.microbatches, list(part.weights), list(part.loss_weights)
        seeds = [part.ranks * weight for weight in loss_weights]
        if train is not None and train.weigh is not None:
            seeds = train.weigh(microbatches)
            weights = loss_weights = [seed / part.ranks for seed in seeds]
        logs, spans = LogCapture(len(microbatches)), list[Span]()
        outputs, losses, calls = list[Any](), list[Tensor | None](), set[int]()
        appended = AppendedEntries(self._root) if trains and part.total > 1 else None
        is_watched = train is not None and self._shares.size > 1 and not self._leaves
        left = LeftBehind(self._root, by_content=self.is_undecided) if is_watched else None
        before = StepStart(self._root) if train is not None and self.is_shared else None
        grad = torch.set_grad_enabled(trains or torch.is_grad_enabled())
        counted = self._metrics.counted
        with (
            self._randomness.isolated() if not by_hand else contextlib.nullcontext(),
            grad,
            self._metrics.step(),
            counted.batch(are_shares=part.ranks > 1),
            self._layers(),
        ):
            for index, microbatch in enumerate(microbatches):
                place = self._replica * part.total + part.first + index
                keyed = self._draws.keyed(name, step_number, place) if not by_hand else contextlib.nullcontext()
                start = time.perf_counter()
                weighed = counted.microbatch(part.loss_weights[index])
                path = CodePath() if is_watched else None
                with self.around_step(), context(), keyed, logs.microbatch(self._root, index), weighed:
                    with path or contextlib.nullcontext():
                        output = step(microbatch, *rest)
                    if self.joins_results:
                        output = self._joined(output)
                calls |= set() if path is None else calls_of(set(path.steps)).keys()
                middle = time.perf_counter()
                spans.append(Span(0, Action(Kind.F, 0, index), start, middle))
                if train is not None:
                    is_last = index == len(microbatches) - 1
                    with self.guards.off():
                        losses.append(backward_of(output, train, seeds[index], is_last=is_last))
                    spans.append(Span(0, Action(Kind.B, 0, index), middle, time.perf_counter()))
                outputs.append(map_leaves(detached, output) if trains else output)
                if appended is not None:
                    appended.after_microbatch()
                del output, microbatch
            if train is not None:
                train.reduce(0)
        is_read = by_hand or (share_output and not all(isinstance(output, Tensor) for output in outputs))
        shown = outputs if not trains or is_read or self._shares.size == 1 else []
        numbers = [None if loss is None else float(loss) for loss in losses] or [None] * len(weights)
        sizes, by_samples = sizes_of(microbatches), self._weighing.now.keys
        given = Given(weights, loss_weights, by_samples, logs.entries(), numbers, sizes, shown)
        if appended is not None:
            given.appended = appended.rows
        if left is not None:
            given.calls = frozenset(calls)
            given.news = LEAVES if left.something() else BRANCHES if calls - self._calls else 0
        if part.ranks > 1:
            given.checksum = part.checksum
            given = self._shares.together(given)
        if self.is_undecided:
            self._left, self._calls = left, self._calls | calls
        elif left is not None:
            self._learn(given.news if part.ranks > 1 and self._shares.are_all else self._shares.most(given.news))
        if before is not None and not self.is_shared:  # what it has given is that of a share
            before.restore("does something new, and would run on whole batches")
            return StepResult(None, None, [], spans, is_undone=True)
        if appended is not None:
            appended.put(given.appended, given.weights, given.sizes, given.losses, given.loss_weights)
        loss = given.loss
        known = next((loss for loss in losses if loss is not None), None)
        total = None if loss is None else torch.tensor(loss) if known is None else known.new_tensor(loss)
        output = given.joined_output(name) if shown else total
        return StepResult(output, total, given.logs(), spans)

    def look_again(self) -> None:
        """Compare the next batch with its parts once more: what a step weighs may follow its number."""
        if self.is_shared:
            self._leaves, self.is_undecided = None, True

    def _learn(self, news: int) -> None:
        """What all ranks have seen of a training batch: the next one may have to run whole."""
        if news == LEAVES:
            self._leaves = True
        elif news == BRANCHES:
            self._leaves, self.is_undecided = None, True

    def decide(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        compares: bool,
        is_written: bool,
    ) -> None:
        """Compare a training batch with its parts: what they weigh by in its loss.

        Ranks that could share batches have run it whole. Where its loss is no mean over parts, or the step has left
        something behind, each runs all of them. Microbatches are to run it next.

        Args:
            step: As for ``run``.
            args: As for ``run``.
            context: As for ``run``.
            compares: Whether to try; otherwise it is taken for one.
            is_written: Whether the step has written parameters.
        """
        self.is_undecided, left = False, self._left
        batch, *rest = args
        count = self.count("training_step", batch)
        if left is not None:
            self.has_left_rows = left.rows(batch_size_of(batch))
            self._leaves = self._shares.on_any(is_written or left.something())
            count *= self._shares.size
        elif self.splitter is None and (self._wanted or 1) > 1:
            batch, count = self._weighing.two_parts(batch, count), min(count, 2)  # which memory has room for
        else:
            return
        if self._leaves or not compares:
            return
        size = batch_size_of(batch)
        is_small = count < 2 or (self.splitter is None and (size is None or size < count))
        if self._shares.on_any(is_small or is_written):  # layers may be gathered from replicas
            if left is not None:  # another batch may be larger
                self._num_small += 1
                self.is_undecided = self._num_small < _MOST_SMALL
                self._leaves = None if self.is_undecided else True
            return

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with self.around_step(), context():
                yield

        with self._metrics.step(), self._layers():
            found = weighing_of(
                self._root, lambda part: step(part, *rest), batch, count, self.splitter, self._randomness, around
            )
            self.settle()
        found = self._shares.agree(found)
        if left is not None:
            self._leaves = found.mixes
        self._weighing.learn(found, batch, count)
        if found.mixes and found.differing is not None:
            self._tell(describe_mixing(found.differing, "" if left is None else "So each rank runs whole batches"))

    def look_at(self, batch: Any) -> None:
        """Before a training batch: have it compared with its parts if it may show what they weigh by; collective."""
        is_alone = self._shares.size == 1
        if (is_alone and (self.splitter is not None or (self._wanted or 1) < 2)) or self._leaves:
            return
        now = self._weighing.now  # the same on all ranks
        if not now.mixes and len(now.counts) != 1 and not self.is_undecided:
            count = self.count("training_step", batch) * self._shares.size
            if self._shares.on_any(self._weighing.is_open(batch, count)):
                self._leaves, self.is_undecided = None, True

    def _joined(self, output: Any) -> Any:
        """What a step returned; tensors that it hands on in shards are joined there, and where it keeps them."""
        kept = [(place, leaf) for place, leaf in reachable(self._root, plain=False) if isinstance(leaf, Deferred)]
        put(self._root, [place for place, _ in kept], [whole_of(leaf).detach() for _, leaf in kept])
        return map_leaves(whole_of, output)

    def _part(self, batch: Any, count: int, *, trains: bool, by_hand: bool) -> Part:
        if not trains:
            parts, weights = split(batch, count, self.splitter)
            return Part(parts, weights, weights, first=0, total=count, ranks=1)
        # By hand, the number of optimizer steps may be that of the samples, and draws are those of one process.
        if by_hand or (self._shares.size > 1 and not self.is_shared):
            return self._shares.whole(batch)
        return self._shares.of(batch, count, self.splitter, self._weighing.now)

    @contextlib.contextmanager
    def _layers(self) -> Iterator[None]:
        """Layers run in here as they are shared; what the user has compiled around them runs as it is written."""
        with self.around_units(), slow_attention():
            if not self._compiled_around:
                yield
                return
            self._uncompiled.on()
            try:
                yield
            finally:
                self._uncompiled.off()
