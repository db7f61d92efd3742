"""Verification of layouts: runs the references and the layouts on processes, compares the records, and reports."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from lightning_hybrid.text import columns, contrasted, counted
from lightning_hybrid.verify.compare import RESUMED, Difference, noise_by_parameter, unmoved, worst
from lightning_hybrid.verify.data import EVALUATIONS, DataSplit
from lightning_hybrid.verify.dropout import WithoutDropout
from lightning_hybrid.verify.experiment import Experiment, run_once
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.ranks import RanksFailed, run_ranks
from lightning_hybrid.verify.record import RunRecord
from lightning_hybrid.verify.references import (
    Comparison,
    Judge,
    Reference,
    data_split_of,
    first_loss,
    run_pieces,
    run_plain,
)

# An update that rounding alone changes by more, relative to its size, is compared weakly.
_WEAK = 1e-2
_UNSPLIT = "each batch was one microbatch"
Outcome = Literal["same", "refused", "different", "failed"]
_DROPPED = "both sides ran without dropout"
_OF_RANKS = "the module draws random numbers, and ranks that share a layer draw what they drop each for itself"
_OF_WEIGHTS = "the module draws what it drops of weights, for each microbatch, and a full batch draws once"


@dataclass(frozen=True)
class Report:
    """The comparison of one layout with its reference.

    Attributes:
        layout: Name of the layout.
        outcome: "same"; "refused" with a clear error before any parameter changed; "different"; or "failed".
        message: One sentence that says why, for every outcome but "same".
        first: The first value that differs.
        worst: The values that differ most at that step, the worst first.
        num_differences: Number of values that differ.
        steps: Number of training steps compared; of a failed run, those before the failure.
        batch: Replicas, microbatches of each, and samples of a microbatch (0 if unknown).
        num_parameters: Number of parameters whose updates were compared.
        num_weak: Number of these whose updates rounding alone changes by more than 1 %.
        floor: The largest relative noise floor of a parameter's update.
        largest: Of the values that are the same but for rounding, the relative difference of the one nearest to its
            limit.
        limit: The relative difference up to which that value counts as the same.
        declared: Logged numbers that differ as the run itself warns; they count for no outcome.
        notes: Further remarks for the user.
        traceback: Of the error that ended a run which failed.
    """

    layout: str
    outcome: Outcome
    message: str = ""
    first: Difference | None = None
    worst: tuple[Difference, ...] = ()
    num_differences: int = 0
    steps: int = 0
    batch: tuple[int, int, int] = (0, 0, 0)
    num_parameters: int = 0
    num_weak: int = 0
    floor: float = 0.0
    largest: float = 0.0
    limit: float = 0.0
    declared: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    traceback: str = ""

    def __str__(self) -> str:
        """Outcome, message, the worst values and notes as text."""
        lines = [f"{self.layout}: {self.outcome}" + (f": {self.message}" if self.message else ""), *self.worst_lines()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def worst_lines(self) -> list[str]:
        """Lines about the values that differ most: what, on which rank, both numbers; none if only one differs."""
        if len(self.worst) < 2:
            return []
        rows = [["value", "rank", self.layout, "one process", "relative difference"]]
        for each in self.worst:
            both = contrasted(each.value, each.reference) if each.shapes is None else map(str, reversed(each.shapes))
            at = f" at {list(each.element)}" * bool(each.element)
            rows.append([f"{each.key}{at}", str(each.rank), *both, f"{each.difference:.2g}"])
        count, when = counted(self.num_differences, "value"), self.worst[0].key.when
        lines = [f"  {line}" for line in columns(rows, right=1)]
        return [f"{self.layout}: {count} differ, most of all {when}:", *lines]

    def passes(self, *, strict: bool = False) -> bool:
        """Whether the outcome is acceptable: "same", or "refused" unless ``strict``."""
        return self.outcome == "same" or (self.outcome == "refused" and not strict)


def table(reports: list[Report]) -> str:
    """Format all reports as a table."""
    rows = [["layout", "outcome", "batch", "steps", "rounding", "why"]]
    rows += [[r.layout, _outcome(r), _batch(r), str(r.steps), _rounding(r), r.message] for r in reports]
    if not any(report.message for report in reports):
        return "\n".join(columns([row[:-1] for row in rows]))
    return "\n".join(columns(rows, wrapped=5))


def _outcome(report: Report) -> str:
    """The outcome; "same (weak)" if rounding alone changes more than half of the updates by more than 1 %."""
    is_weak = report.outcome == "same" and 2 * report.num_weak > report.num_parameters
    return f"{report.outcome}{' (weak)' * is_weak}{' but ' * bool(report.declared)}{', '.join(report.declared)}"


def _batch(report: Report) -> str:
    """Replicas x microbatches x samples."""
    return " x ".join(str(size or "?") for size in report.batch) if any(report.batch) else ""


def _rounding(report: Report) -> str:
    """The largest difference by rounding of values that are the same, and its limit."""
    if not report.steps or report.outcome != "same":
        return ""
    return f"{report.largest:.1g}, limit {report.limit:.1g}" if report.limit else "none"


class LayoutConnection:
    """Makes the strategy of a layout."""

    def __init__(self, layout: Layout, num_microbatches: int | None) -> None:
        """Take ``layout`` (the layout to run under), ``num_microbatches`` (the number where the layout names none)."""
        self.devices = layout.devices
        self._layout, self._num_microbatches = layout, num_microbatches

    def strategy(self, pl: ModuleType) -> Any:
        """Make the strategy as ``Trainer(strategy=name)`` does, with the options of the layout."""
        registry = importlib.import_module(f"{pl.__name__}.strategies").StrategyRegistry
        entry = registry[self._layout.strategy_name]
        return entry["strategy"](**{**entry["init_params"], **self._layout.options(self._num_microbatches)})

    def connect(self, trainer: Any, module: Any) -> None:
        """Do nothing: the strategy is all that a layout sets."""

    def finish(self, observed: RunRecord) -> None:
        """Do nothing: the record is complete."""

    def file_of(self, path: str) -> str:
        """The checkpoint as one file: a layout may save a folder."""
        # Late: a process that runs the reference imports nothing of what saves.
        from lightning_hybrid.checkpoint.convert import to_file
        from lightning_hybrid.checkpoint.folder import is_folder

        if not is_folder(path):
            return path
        to_file(Path(path), Path(f"{path}.one"), weights_only=False)
        return f"{path}.one"


def run_layout(experiment: Experiment, layout: Layout) -> RunRecord:
    """Run an experiment on one rank of a layout, as `run_once`."""
    return run_once(experiment, LayoutConnection(layout, experiment.num_microbatches))


class RunRanks(Protocol):
    """Protocol: calls a function on the ranks of a world of processes and returns the result of each."""

    def __call__(self, n: int, function: Callable[..., Any], /, *args: Any, timeout: float) -> list[Any]:
        """Call it; if a rank fails or exceeds the timeout, raise an exception whose text says so."""


class Verification:
    """Compares one experiment under any number of layouts; one reference is run per data split."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        run: RunRanks | None = None,
        timeout: float = 300.0,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set up the verification; ``run`` starts processes by default, ``timeout`` has the most seconds of a run.

        ``on_phase`` receives the name of each run as it begins.
        """
        self.experiment = experiment
        self._on_phase = on_phase
        self._run: RunRanks = run_ranks if run is None else run
        self._timeout = timeout
        self._plain: dict[DataSplit, Reference] = {}
        self._of_pieces: dict[tuple[DataSplit, bool, bool], Reference] = {}

    def reference(self, data_split: DataSplit) -> Reference:
        """Run the plain step on full batches, or return it if a layout that splits the data alike has run it."""
        if data_split not in self._plain:
            self._on_phase("one process as the reference")
            [self._plain[data_split]] = self._run(1, run_plain, self.experiment, data_split, timeout=self._timeout)
        return self._plain[data_split]

    def reference_of_pieces(
        self, data_split: DataSplit, plain: Reference | None, training: bool, evaluation: bool
    ) -> Reference:
        """Run the step on full batches of replicas, or on their microbatches, in training and in evaluation."""
        key = data_split, training, evaluation or data_split.unsplit_steps >= EVALUATIONS
        if key not in self._of_pieces:
            self._on_phase(f"one process as the reference, with {'full batches' if training else 'microbatches'}")
            arguments = self.experiment, data_split, plain, *key[1:]
            [self._of_pieces[key]] = self._run(1, run_pieces, *arguments, timeout=self._timeout)
        return self._of_pieces[key]

    def check(self, layout: Layout) -> Report:
        """Run a layout and compare it with its reference; failures are reported, not raised."""
        if self.experiment.trainer.get("sync_batchnorm") and layout.replicas > 1:
            message = (
                f"sync_batchnorm=True takes statistics over {layout.replicas} replicas at once, and the reference takes"
                " those of each; verify without it, or one replica"
            )
            return Report(layout.name, "failed", message)
        data_split = data_split_of(self.experiment, layout)
        try:
            plain, failed = self._reference_that_runs(data_split)
        except Exception as error:
            return Report(layout.name, "failed", f"the reference did not run: {_error_text(error)}")
        notes = tuple(failed.notes)
        if failed.failure is not None:
            if self.experiment.precision == "64-true" and "Double" in failed.failure.message:
                notes = (*notes, "some kernel does not support float64: try --precision 32-true")
            message, shown = f"in the reference: {failed.failure.message}", failed.failure.traceback
            return Report(layout.name, "failed", message, notes=notes, traceback=shown)
        self._on_phase(f"the layout, {layout.devices} process{'es' * (layout.devices > 1)}")
        try:
            ranks = self._run(layout.devices, run_layout, self.experiment, layout, timeout=self._timeout)
        except Exception as error:
            return Report(layout.name, "failed", _error_text(error), notes=notes)
        failed_after_fit = any(each.failure is not None and each.failure.resuming for each in ranks)
        if (report := _failed(layout, ranks)) is not None and not failed_after_fit:
            return report
        changed = _split_of_ranks(data_split, ranks[0])
        found = self._judged(ranks, plain, data_split, changed)
        if report is not None and all(each.key.what == RESUMED for each in found.differences):
            return report
        report = self._report_of(layout, ranks, found)
        # With replicas the reference of their own batches draws as they do.
        is_undivided = layout.replicas == 1 and found.reference.observed.has_undivided_draws
        why = _OF_RANKS * layout.shares_layers or _OF_WEIGHTS * is_undivided
        may_drop = why and found.reference.draws and report.outcome == "different"
        return self._without_dropout(layout, report, why) if may_drop else report

    def _judged(
        self, ranks: list[RunRecord], plain: Reference | None, data_split: DataSplit, changed: DataSplit
    ) -> Comparison:
        """Compare the ranks, which have split the data in the ``changed`` way, with the references."""
        if plain is not None and plain.depends_on_microbatches and changed != data_split:
            # Evaluation seldom draws: then the reference for the other split holds too.
            if replace(changed, unsplit_steps=data_split.unsplit_steps) == data_split:
                found = Judge(ranks, plain, changed, partial(self.reference_of_pieces, changed, plain)).beside(plain)
                if not found.differences and not found.declared:
                    return found
            plain = self.reference(changed)
        return Judge(ranks, plain, changed, partial(self.reference_of_pieces, changed, plain)).comparison()

    def _without_dropout(self, layout: Layout, drawn: Report, why: str) -> Report:
        """Compare both sides without dropout; return the report of before if they differ even so."""
        if isinstance(self.experiment.make_module, WithoutDropout):
            return drawn
        experiment = replace(self.experiment, make_module=WithoutDropout(self.experiment.make_module))
        again = Verification(experiment, run=self._run, timeout=self._timeout, on_phase=self._on_phase)
        report = again.check(layout)
        return replace(report, notes=(*report.notes, f"{why}: {_DROPPED}")) if report.outcome == "same" else drawn

    def _reference_that_runs(self, data_split: DataSplit) -> tuple[Reference | None, Reference]:
        """The plain step on full batches, None if these do not run as one; and the first reference that runs."""
        plain = self.reference(data_split)
        if plain.failure is not None and plain.failure.resuming:
            self.experiment = replace(self.experiment, resume=False)
            self._plain.clear()
            again = self.reference(data_split)
            again.notes.append(f"no resumed step is compared: one process fails with {plain.failure.message}")
            return again, again
        if plain.failure is None or data_split.replicas == 1:
            return plain, plain
        return None, self.reference_of_pieces(data_split, None, True, True)

    def _report_of(self, layout: Layout, ranks: list[RunRecord], found: Comparison) -> Report:
        reference, differences = found.reference, found.differences
        notes = [*reference.notes, *found.notes]
        if ranks[0].shares > 1:
            kind = "pipelined" if layout.num_stages > 1 else "cut"
            notes.append(f"sharded instead of {kind}: {ranks[0].shares} ranks hold shards")
        elif ranks[0].unpartitioned_steps and layout.num_stages > 1:
            names = ", ".join(sorted(ranks[0].unpartitioned_steps))
            notes.append(f"{names}: run unsplit on every rank, as it cannot be partitioned")
        if (begin := ranks[0].unsplit_from) is not None:
            since = f" from step {begin + 1} on" if begin else ""
            notes.append(f"training_step makes values that microbatches do not determine: {_UNSPLIT}{since}")
        full, mean = reference.unchanged_loss, first_loss(reference.observed)
        if full is not None and mean is not None:
            replicas, count, _ = reference.observed.batch
            of_batch, of_parts = contrasted(full, mean)
            if of_batch == of_parts:  # such as of layers that begin with a weight of zero
                notes.append(f"the objective mixes samples, by BatchNorm, but not in the first loss, {of_batch}")
            else:
                notes.append(
                    f"the objective mixes samples: full batch {of_batch}, mean of {replicas * count} microbatches"
                    f" {of_parts}"
                )
        noise = noise_by_parameter(reference.observed, reference.noisy)
        floor, num_weak = max(noise.values(), default=0.0), sum(one > _WEAK for one in noise.values())
        if unchanged := unmoved(reference.observed):
            notes.append(
                f"{len(unchanged)} trainable parameters did not change in the reference, such as {unchanged[0]}"
            )
        if num_weak:
            sharper = "; use --precision 32-true" * ("16" in reference.precision)
            notes.append(
                f"rounding alone changes the updates of {num_weak} of {len(noise)} parameters by more than 1 % of their"
                f" size (up to {floor:.2g}): their comparison is weak{sharper}"
            )
        first, message = (differences[0], f"{differences[0]}{found.advice}") if differences else (None, "")
        if reference.irreproducible is not None:
            first = reference.irreproducible
            message = f"two equal runs in one process differ: the module draws from a source without a seed; {first}"
        elif first is not None and self.experiment.precision == "64-true" and first.difference < 1e-4:
            notes.append("a difference this small may come from float32 inside the module: try --precision 32-true")
        nearest = max(found.margins, default=None)
        return Report(
            layout.name,
            "same" if first is None else "different",
            message,
            first,
            () if reference.irreproducible else worst(differences),
            len(differences),
            len(ranks[0].steps),
            reference.observed.batch,
            len(noise),
            num_weak,
            floor,
            declared=tuple(dict.fromkeys(each.key.name for each in found.declared)),
            largest=0.0 if nearest is None else nearest.difference,
            limit=0.0 if nearest is None else nearest.limit,
            notes=tuple(notes),
        )


def _split_of_ranks(data_split: DataSplit, first: RunRecord) -> DataSplit:
    """How the ranks of a layout have split the data, where that is only known after the run."""
    unsplit_steps = data_split.unsplit_steps | first.unpartitioned_steps | first.unsplit_steps
    if first.shares > 1:
        start, end = first.pipelined
        shares = first.shares if first.shared else 1
        changed = replace(data_split, plain=True, start=start, end=end)
        if not data_split.plain:
            changed = replace(changed, unsplit_steps=unsplit_steps, unsplit_from=first.unsplit_from)
        changed = replace(changed, shares=shares, shared=frozenset(first.shared))
        return changed if first.shared or end else replace(changed, num_microbatches=1)
    return replace(data_split, unsplit_steps=unsplit_steps, unsplit_from=first.unsplit_from, start=first.pipelined[0])


def _failed(layout: Layout, ranks: Sequence[RunRecord]) -> Report | None:
    failures = [(rank, observed.failure) for rank, observed in enumerate(ranks) if observed.failure is not None]
    if not failures:
        return None
    causes = [(rank, failure) for rank, failure in failures if not failure.lost] or failures
    unchanged = len(failures) == len(ranks) and all(f.refused or (f.lost and f.unchanged) for _, f in failures)
    if unchanged and all(failure.refused for _, failure in causes):
        return Report(layout.name, "refused", causes[0][1].message)
    rank, failure = next(((rank, f) for rank, f in causes if not f.refused), causes[0])
    message = f"rank {rank}: {failure.message} ({failure.where})"
    return Report(layout.name, "failed", message, steps=len(ranks[rank].steps), traceback=failure.traceback)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, RanksFailed) else f"{type(error).__name__}: {error}"


def verify(
    make_module: Callable[[], Any],
    make_data: Callable[[], Any] | None,
    layout: Layout,
    *,
    run: RunRanks | None = None,
    timeout: float = 300.0,
    **others: Any,
) -> Report:
    """Train a module under a layout and in one process, and report whether the numbers are the same.

    Args:
        make_module: Makes the LightningModule; defined at the top level of a module, so that it can be pickled.
        make_data: Makes a LightningDataModule, a loader, or a dict of arguments of ``Trainer.fit``; None if the module
            defines its loaders.
        layout: The layout to verify.
        run: Runs functions on ranks; starts processes by default.
        timeout: Maximum seconds per run.
        **others: The other arguments of an `Experiment`.

    Returns:
        The outcome, and the first value that differs.
    """
    experiment = Experiment(make_module=make_module, make_data=make_data, **others)
    return Verification(experiment, run=run, timeout=timeout).check(layout)
