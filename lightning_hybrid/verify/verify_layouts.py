"""Verify layouts: run the references and the layouts on processes, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lightning_hybrid.verify.layout_run import Experiment, observe_layout
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.one_process.data_split import Cut
from lightning_hybrid.verify.rank_launcher import RanksFailed, run_ranks
from lightning_hybrid.verify.records.record_comparison import compare, noise_of, unmoved
from lightning_hybrid.verify.records.run_record import Observed
from lightning_hybrid.verify.reference_run import Reference, cut_of, observe_reference
from lightning_hybrid.verify.report import Report


class RunRanks(Protocol):
    """Calls a function on ranks of a world of processes and returns what each returned."""

    def __call__(self, n: int, function: Callable[..., Any], /, *args: Any, timeout: float) -> list[Any]:
        """Raise any exception whose text says what went wrong if a rank fails or takes too long."""


class Verification:
    """Compares one experiment under any number of layouts; references are run once per way to cut the data."""

    def __init__(self, experiment: Experiment, *, run: RunRanks | None = None, timeout: float = 300.0) -> None:
        """How to verify.

        Args:
            experiment: What to run.
            run: Runs functions on ranks; processes of its own by default.
            timeout: Seconds that one run may take.
        """
        self.experiment = experiment
        self._run: RunRanks = run_ranks if run is None else run
        self._timeout = timeout
        self._references: dict[Cut, Reference] = {}

    def reference(
        self,
        layout: Layout,
        steps_at_once: frozenset[str] = frozenset(),
        shares: int = 1,
        *,
        in_shares: bool = False,
        at_once: bool = False,
        pipelined: tuple[int, int | None] = (0, None),
    ) -> Reference:
        """What a layout is compared with.

        Args:
            layout: To run under.
            steps_at_once: Steps that run on whole batches there.
            shares: Ranks that hold shards there, instead of stages.
            in_shares: Whether they run training steps on shares of a batch.
            at_once: Whether each replica's batch is one part: what means over tokens and metrics are compared with.
            pipelined: The first training batch that ran in stages there, and the first after them that did not.
        """
        cut = cut_of(self.experiment, layout)
        if not cut.plain:
            cut = replace(cut, at_once=steps_at_once)
        if shares > 1:
            cut = replace(cut, shares=shares if in_shares else 1, plain=True, start=pipelined[0], end=pipelined[1])
            cut = cut if in_shares or pipelined[1] else replace(cut, num_microbatches=1)
        elif not cut.plain:
            cut = replace(cut, start=pipelined[0])
        if at_once:
            cut = replace(cut, num_microbatches=1, shares=1, start=0, end=None)
        if cut not in self._references:
            [self._references[cut]] = self._run(1, observe_reference, self.experiment, cut, timeout=self._timeout)
        return self._references[cut]

    def check(self, layout: Layout) -> Report:
        """Run a layout and compare it with its reference; all failures are told in the report."""
        if self.experiment.trainer.get("sync_batchnorm") and layout.replicas > 1:
            message = (
                f"sync_batchnorm=True takes statistics over {layout.replicas} replicas at once, and the reference runs"
                " their batches one after the other; verify without it, or one replica"
            )
            return Report(layout.name, "failed", message)
        try:
            reference = self.reference(layout)
        except Exception as error:
            return Report(layout.name, "failed", f"the reference did not run: {_text(error)}")
        notes = tuple(reference.notes)
        if reference.failure is not None:
            if self.experiment.precision == "64-true" and "Double" in reference.failure.message:
                notes = (*notes, "some kernel does not know float64: try --precision 32-true")
            return Report(layout.name, "failed", f"in the reference: {reference.failure.message}", notes=notes)
        try:
            ranks = self._run(layout.devices, observe_layout, self.experiment, layout, timeout=self._timeout)
        except Exception as error:
            return Report(layout.name, "failed", _text(error), notes=notes)
        failed = _failed(layout, ranks)
        first = ranks[0]
        steps_at_once = first.uncut | first.at_once
        if failed is None and (steps_at_once or first.shares > 1 or first.pipelined != (0, None)):
            given = {"shares": first.shares, "in_shares": first.in_shares, "pipelined": first.pipelined}
            reference = self.reference(layout, steps_at_once, **given)
        report = failed or self._compared(layout, ranks, reference)
        is_split = cut_of(self.experiment, layout).num_microbatches != 1 or first.in_shares
        if report.outcome == "different" and is_split:
            at_once = self.reference(layout, steps_at_once, at_once=True)
            runs_differ = reference.irreproducible is not None or at_once.irreproducible is not None
            if at_once.failure is None and not runs_differ and self._agrees_with_either(ranks, reference, at_once):
                notes = *report.notes, "means over tokens and metrics are those of each replica's whole batch"
                report = replace(report, outcome="same", message="", first=None, num_differences=0, notes=notes)
        return report

    def _agrees_with_either(self, ranks: list[Observed], parts: Reference, at_once: Reference) -> bool:
        """Whether each logged number is that of the parts or of whole batches, and all others are those of one."""
        found = [
            compare(ranks, one.observed, one.noisy, precision=self.experiment.precision) for one in (parts, at_once)
        ]
        keys = [{difference.key for difference in differences} for differences in found]
        others = [any(not key.what.startswith("metric") for key in each) for each in keys]
        return keys[0].isdisjoint(keys[1]) and not all(others)

    def _compared(self, layout: Layout, ranks: list[Observed], reference: Reference) -> Report:
        notes = list(reference.notes)
        if ranks[0].shares > 1:
            kind = "pipelined" if layout.num_stages > 1 else "cut"
            notes.append(f"sharded instead of {kind}: {ranks[0].shares} ranks hold shards")
        elif ranks[0].uncut and layout.num_stages > 1:
            notes.append(f"{', '.join(sorted(ranks[0].uncut))}: run whole on every rank, as no cut can be made of it")
        if "training_step" in ranks[0].at_once:
            notes.append("training_step keeps what microbatches do not tell: each batch was one microbatch")
        differences = compare(ranks, reference.observed, reference.noisy, precision=self.experiment.precision)
        floor = noise_of(reference.observed, reference.noisy)
        if still := unmoved(reference.observed):
            notes.append(f"{len(still)} trainable parameters did not move in the reference, such as {still[0]}")
        if floor > 1e-2:
            notes.append(f"noise alone changes an update by {floor:.2g} of its size: such parameters prove little")
        first, message = (differences[0], str(differences[0])) if differences else (None, "")
        if reference.irreproducible is not None:
            first = reference.irreproducible
            message = f"two equal runs in one process differ: the module draws from a source without a seed; {first}"
        elif first is not None and self.experiment.precision == "64-true" and first.difference < 1e-4:
            notes.append("a difference this small may come from float32 inside the module: try --precision 32-true")
        return Report(
            layout.name,
            "same" if first is None else "different",
            message,
            first,
            len(differences),
            len(ranks[0].steps),
            floor,
            tuple(notes),
        )


def _failed(layout: Layout, ranks: Sequence[Observed]) -> Report | None:
    failures = [(rank, observed.failure) for rank, observed in enumerate(ranks) if observed.failure is not None]
    if not failures:
        return None
    causes = [(rank, failure) for rank, failure in failures if not failure.lost] or failures
    unchanged = len(failures) == len(ranks) and all(f.refused or (f.lost and f.unchanged) for _, f in failures)
    if unchanged and all(failure.refused for _, failure in causes):
        return Report(layout.name, "refused", causes[0][1].message)
    rank, failure = next(((rank, f) for rank, f in causes if not f.refused), causes[0])
    message = f"rank {rank}: {failure.message} ({failure.where})"
    return Report(layout.name, "failed", message, steps=len(ranks[rank].steps))


def _text(error: Exception) -> str:
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
    """Train a module under a layout and in one process, and say whether the numbers are the same.

    Args:
        make_module: Makes the LightningModule; at the top of a module, as it is sent to other processes.
        make_data: Makes a LightningDataModule, a loader, or a dict of arguments of ``Trainer.fit``; None if the module
            has its own.
        layout: To verify.
        steps: Batches of an epoch, and of a validation, at most.
        epochs: How many.
        num_microbatches: Parts of each replica's batch; None leaves it to the strategy.
        precision: As Lightning spells it; in "64-true" real differences stand out from rounding.
        seed: Of everything drawn.
        trainer: Further arguments of the Trainer.
        run: Runs functions on ranks; processes of its own by default.
        timeout: Seconds that one run may take.

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
