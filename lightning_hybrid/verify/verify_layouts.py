"""Verification of layouts: runs the references and the layouts on processes, and compares the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lightning_hybrid.verify.layout_run import run_layout
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.one_process.data_split_of_layout import DataSplit
from lightning_hybrid.verify.rank_launcher import RanksFailed, run_ranks
from lightning_hybrid.verify.records.record_comparison import Margin, compare, noise_by_parameter, unmoved
from lightning_hybrid.verify.records.run_record_and_recorder import RunRecord
from lightning_hybrid.verify.reference_and_noise_runs import Reference, are_close, data_split_of, run_reference
from lightning_hybrid.verify.report import Report
from lightning_hybrid.verify.run_experiment import Experiment

# An update that rounding alone changes by more, relative to its size, is compared weakly.
_WEAK = 1e-2


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
        """Set up the verification.

        Args:
            experiment: The run.
            run: Runs functions on ranks; starts processes by default.
            timeout: Maximum seconds per run.
            on_phase: Receives the name of each run as it begins.
        """
        self.experiment = experiment
        self._on_phase = on_phase
        self._run: RunRanks = run_ranks if run is None else run
        self._timeout = timeout
        self._references: dict[DataSplit, Reference] = {}

    def reference(
        self,
        layout: Layout,
        unsplit_steps: frozenset[str] = frozenset(),
        shares: int = 1,
        *,
        in_shares: bool = False,
        unsplit: bool = False,
        pipelined: tuple[int, int | None] = (0, None),
    ) -> Reference:
        """Run the reference of a layout, or return it if a layout with the same data split has run it.

        Args:
            layout: The layout to compare.
            unsplit_steps: Steps that the layout runs on full batches.
            shares: Number of ranks that hold shards instead of stages under the layout.
            in_shares: Whether they run training steps on shares of a batch.
            unsplit: Whether each replica's batch runs unsplit, with BatchNorm's statistics per microbatch: the
                reference of means over tokens and of metrics.
            pipelined: The first training batch that ran in stages, and the first after them that did not.
        """
        split = data_split_of(self.experiment, layout)
        if not split.plain:
            split = replace(split, unsplit_steps=unsplit_steps)
        if shares > 1:
            split = replace(split, shares=shares if in_shares else 1, plain=True, start=pipelined[0], end=pipelined[1])
            split = split if in_shares or pipelined[1] else replace(split, num_microbatches=1)
        elif not split.plain:
            split = replace(split, start=pipelined[0])
        if unsplit:
            split = replace(split, joined=True)
        if split not in self._references:
            self._on_phase(f"one process as the reference{', with full batches' if unsplit else ''}")
            [self._references[split]] = self._run(1, run_reference, self.experiment, split, timeout=self._timeout)
        return self._references[split]

    def check(self, layout: Layout) -> Report:
        """Run a layout and compare it with its reference; failures are reported, not raised."""
        if self.experiment.trainer.get("sync_batchnorm") and layout.replicas > 1:
            message = (
                f"sync_batchnorm=True takes statistics over {layout.replicas} replicas at once, and the reference runs"
                " their batches one after the other; verify without it, or one replica"
            )
            return Report(layout.name, "failed", message)
        try:
            reference = self.reference(layout)
        except Exception as error:
            return Report(layout.name, "failed", f"the reference did not run: {_error_text(error)}")
        notes = _notes_of(reference)
        if reference.failure is not None:
            if self.experiment.precision == "64-true" and "Double" in reference.failure.message:
                notes = (*notes, "some kernel does not support float64: try --precision 32-true")
            message, shown = f"in the reference: {reference.failure.message}", reference.failure.traceback
            return Report(layout.name, "failed", message, notes=notes, traceback=shown)
        self._on_phase(f"the layout, {layout.devices} process{'es' * (layout.devices > 1)}")
        try:
            ranks = self._run(layout.devices, run_layout, self.experiment, layout, timeout=self._timeout)
        except Exception as error:
            return Report(layout.name, "failed", _error_text(error), notes=notes)
        failed = _failed(layout, ranks)
        first = ranks[0]
        unsplit_steps = first.unpartitioned_steps | first.unsplit_steps
        if failed is None and (unsplit_steps or first.shares > 1 or first.pipelined != (0, None)):
            options = {"shares": first.shares, "in_shares": first.in_shares, "pipelined": first.pipelined}
            reference = self.reference(layout, unsplit_steps, **options)
        report = failed or self._report_of(layout, ranks, reference)
        is_split = data_split_of(self.experiment, layout).num_microbatches != 1 or first.in_shares
        if report.outcome == "different" and is_split:
            unsplit = self.reference(layout, unsplit_steps, unsplit=True)
            runs_differ = reference.irreproducible is not None or unsplit.irreproducible is not None
            margins: list[Margin] = []
            agrees = unsplit.failure is None and self._agrees_with_either(ranks, reference, unsplit, margins)
            if agrees and not runs_differ:
                notes = self._notes_of_full_batch(report, reference, unsplit)
                report = replace(report, outcome="same", message="", first=None, num_differences=0, notes=notes)
                report = _with_margin(report, margins)
        return report

    def _notes_of_full_batch(self, report: Report, split: Reference, unsplit: Reference) -> tuple[str, ...]:
        """The notes of a layout whose loss or metrics are those of each replica's full batch."""
        losses = [reference.observed.steps[0].loss for reference in (split, unsplit) if reference.observed.steps]
        unweighted, loss = losses if len(losses) == 2 else (None, None)
        if unweighted is None or loss is None or are_close(unweighted, loss, split.precision):
            return *report.notes, "metrics are those of each replica's full batch"
        text = (
            "the loss is a mean over tokens or labels: microbatches are weighted by their number of these, so each"
            f" replica's loss is that of its full batch (unweighted: {unweighted:.6g} instead of {loss:.6g})"
        )
        return *(note for note in report.notes if note != split.mixing), text

    def _agrees_with_either(
        self, ranks: list[RunRecord], split: Reference, unsplit: Reference, margins: list[Margin]
    ) -> bool:
        """Whether each logged number matches one of two references, and all other values match the same one.

        ``margins`` receives those of the reference with fewer differences.
        """
        found: list[list[Margin]] = [[], []]
        compared = [
            compare(ranks, one.observed, one.noisy, precision=one.precision, margins=own)
            for one, own in zip((split, unsplit), found, strict=True)
        ]
        margins += found[len(compared[1]) <= len(compared[0])]
        keys = [{difference.key for difference in differences} for differences in compared]
        others = [any(not key.what.startswith("metric") for key in each) for each in keys]
        return keys[0].isdisjoint(keys[1]) and not all(others)

    def _report_of(self, layout: Layout, ranks: list[RunRecord], reference: Reference) -> Report:
        notes = list(_notes_of(reference))
        if ranks[0].shares > 1:
            kind = "pipelined" if layout.num_stages > 1 else "cut"
            notes.append(f"sharded instead of {kind}: {ranks[0].shares} ranks hold shards")
        elif ranks[0].unpartitioned_steps and layout.num_stages > 1:
            names = ", ".join(sorted(ranks[0].unpartitioned_steps))
            notes.append(f"{names}: run unsplit on every rank, as it cannot be partitioned")
        if "training_step" in ranks[0].unsplit_steps:
            notes.append("training_step keeps values that microbatches do not determine: each batch was one microbatch")
        margins: list[Margin] = []
        differences = compare(
            ranks, reference.observed, reference.noisy, precision=reference.precision, margins=margins
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
        first, message = (differences[0], str(differences[0])) if differences else (None, "")
        if reference.irreproducible is not None:
            first = reference.irreproducible
            message = f"two equal runs in one process differ: the module draws from a source without a seed; {first}"
        elif first is not None and self.experiment.precision == "64-true" and first.difference < 1e-4:
            notes.append("a difference this small may come from float32 inside the module: try --precision 32-true")
        report = Report(
            layout.name,
            "same" if first is None else "different",
            message,
            first,
            len(differences),
            len(ranks[0].steps),
            reference.observed.batch,
            len(noise),
            num_weak,
            floor,
            notes=tuple(notes),
        )
        return _with_margin(report, margins)


def _with_margin(report: Report, margins: Sequence[Margin]) -> Report:
    nearest = max(margins, default=None)
    return report if nearest is None else replace(report, largest=nearest.difference, limit=nearest.limit)


def _notes_of(reference: Reference) -> tuple[str, ...]:
    return (*reference.notes, *([reference.mixing] if reference.mixing else []))


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
    steps: int = 4,
    epochs: int = 1,
    num_microbatches: int | None = 2,
    precision: str = "64-true",
    seed: int = 1,
    trainer: dict[str, Any] | None = None,
    run: RunRanks | None = None,
    timeout: float = 300.0,
) -> Report:
    """Train a module under a layout and in one process, and report whether the numbers are the same.

    Args:
        make_module: Makes the LightningModule; defined at the top level of a module, so that it can be pickled.
        make_data: Makes a LightningDataModule, a loader, or a dict of arguments of ``Trainer.fit``; None if the module
            defines its loaders.
        layout: The layout to verify.
        steps: Maximum number of batches of an epoch, and of a validation.
        epochs: Number of epochs.
        num_microbatches: Microbatches of each replica's batch; None leaves it to the strategy.
        precision: Lightning's name of the precision; in "64-true" real differences stand out from rounding.
        seed: Seed of all random generators.
        trainer: Further arguments of the Trainer.
        run: Runs functions on ranks; starts processes by default.
        timeout: Maximum seconds per run.

    Returns:
        The outcome, and the first value that differs.
    """
    experiment = Experiment(
        make_module=make_module,
        make_data=make_data,
        steps=steps,
        epochs=epochs,
        num_microbatches=num_microbatches,
        precision=precision,
        seed=seed,
        trainer=trainer or {},
    )
    return Verification(experiment, run=run, timeout=timeout).check(layout)
