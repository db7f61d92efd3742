"""Runs one case under one layout, compares it with one process, saves it, and loads it with plain Lightning.

The comparison is that of `lightning_hybrid.verify`. What its reference does not imitate (replicas whose step is
optimized by hand, gathers from other replicas, or draws from its own generators) is compared with Lightning's DDP, rank
by rank.
"""

from __future__ import annotations

import pickle
import re
import tempfile
import types
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from conformance.case import Case
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy

from harness.verification import call_quietly
from lightning_hybrid.batch.split import split
from lightning_hybrid.verify import Experiment, Layout, Report, Verification
from lightning_hybrid.verify.compare import compare
from lightning_hybrid.verify.experiment import run_once
from lightning_hybrid.verify.record import RunRecord, perturb, perturbation
from lightning_hybrid.verify.verification import LayoutConnection, run_layout

PARITY, DRAWS, DEMOTED = "parity", "parity up to random draws", "demoted with parity"
REFUSED, FAILED, DIFFERENT = "refused", "failed", "different"

_ONE, _TWO, _FOUR = ({"num_microbatches": count} for count in (1, 2, 4))
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("dp2", 2, _ONE),
        Layout("zero3", 2, {**_ONE, "zero_stage": 3}),
        Layout("tp2", 2, {**_ONE, "tensor_parallel_size": 2}),
        Layout("pp2", 2, {**_TWO, "pipeline_parallel_size": 2}),
        Layout("dp2 x pp2", 4, {**_TWO, "pipeline_parallel_size": 2}),
        Layout("pp2 x 4 microbatches", 2, {**_FOUR, "pipeline_parallel_size": 2}),
        Layout("cp2", 2, {**_ONE, "context_parallel_size": 2}),
        Layout("sp2", 2, {**_ONE, "spatial_parallel_size": 2}),
        Layout("ep2", 2, {**_ONE, "expert_parallel_size": 2}),
        Layout("planned", 2, {"data_parallel_size": 1, "objective": "throughput"}),
    )
}
DDP = Layout("ddp", 2, strategy_name="ddp_find_unused_parameters_true")
_SHARES_LAYERS = {"tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size", "objective"}
_KNOWN_TO_DDP = {"num_microbatches", "zero_stage", "pipeline_parallel_size"}
# What Lightning's DDP has in common with the strategy; metrics are each replica's own there.
_OF_DDP = ("initial weights of", "loss", "gradient norm of", "learning rate of group", "update of", "weights", "buffer")


@dataclass(frozen=True)
class Outcome:
    """What became of a case under a layout.

    Attributes:
        kind: One of the constants above.
        reason: Of every kind but parity; the first line.
        reference: What it was compared with.
    """

    kind: str
    reason: str = ""
    reference: str = "one process"

    @property
    def is_parity(self) -> bool:
        return self.kind in (PARITY, DRAWS, DEMOTED)

    @property
    def summary(self) -> str:
        """The kind and the type of the error: what stays the same when a message is reworded."""
        error = re.search(r"\b(NotOnThisRank|[A-Z]\w*(?:Error|Changed|Exception|Disagree))\b", self.reason)
        return self.kind if self.is_parity or self.kind == DIFFERENT else f"{self.kind}: {error[1] if error else '?'}"


def layouts_of(case: Case) -> list[Layout]:
    """Those that mean something for a case."""
    unfit = {"cp2", "ep2", "sp2"} - set(case.layouts)
    unfit |= set() if case.splits else {"pp2 x 4 microbatches"}
    return [layout if case.splits else _unsplit(layout) for name, layout in LAYOUTS.items() if name not in unfit]


def _unsplit(layout: Layout) -> Layout:
    options = {name: value for name, value in layout.strategy.items() if name != "num_microbatches"}
    return Layout(layout.name, layout.devices, options)


def experiment_of(case: Case) -> Experiment:
    return Experiment(
        make_module=case.make_module,
        make_data=case.make_data,
        steps=case.steps,
        epochs=case.epochs,
        num_microbatches=None,
        precision=case.precision,
        trainer=case.trainer,
        resume=False,  # each case is saved, loaded by Lightning, and trained one step more below
    )


class Checked:
    """The runs of one case; its references are run once."""

    def __init__(self, worlds: Any, case: Case, timeout: float = 60.0) -> None:
        self._worlds, self._case, self._timeout = worlds, case, timeout
        self._experiment = experiment_of(case)
        self._verification = Verification(self._experiment, run=self._run, timeout=timeout)
        self._last: list[_OnRank] = []
        self._ddp: dict[tuple[int, bool], list[RunRecord]] = {}  # by number of microbatches, with and without noise

    def _run(self, n: int, function: Any, /, *args: Any, timeout: float) -> list[Any]:
        if function is not run_layout:
            return self._worlds.run(n, call_quietly, function, args, timeout=timeout)
        self._last = self._worlds.run(n, observe_and_save, *args, str(self._path), timeout=timeout)
        ranks = [rank.observed for rank in self._last]
        for observed in ranks:
            first = next(other for other in ranks if other.replica == observed.replica)
            for name in self._case.of_each_replica:
                assert observed.metrics.get(name) == first.metrics.get(name), f"ranks of a replica disagree on {name}"
        for observed in ranks:
            self._forget_own(observed, ranks[0])
        return ranks

    def _forget_own(self, observed: RunRecord, first: RunRecord) -> None:
        """Hooks make these of what their replica has kept; the reference knows those of the first."""
        theirs = [*(step.metrics for step in observed.steps), *observed.validations, observed.metrics]
        ours = [*(step.metrics for step in first.steps), *first.validations, first.metrics]
        for metrics, known in zip(theirs, ours, strict=False):
            metrics.update({name: known[name] for name in self._case.of_each_replica if name in known})

    def outcome(self, layout: Layout) -> Outcome:
        """Run under the layout, compare, save, and load again."""
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            self._path, self._last = Path(folder) / "after.ckpt", []
            outcome = self._judge(self._verification.check(layout), layout)
            if not outcome.is_parity:
                return outcome
            arguments = self._experiment, str(self._path), _tensors(self._last[0].observed)
            try:
                [said] = self._worlds.run(1, call_quietly, load_plainly, arguments, timeout=self._timeout)
            except Exception as error:
                said = _shown(error)
            return Outcome(FAILED, f"not loaded: {said}") if said else outcome

    def _judge(self, report: Report, layout: Layout) -> Outcome:
        reason, against = _first_line(report.message), "one process"
        has_no_reference = report.outcome == "failed" and not self._last and "in the reference" in report.message
        has_ddp = layout.replicas == DDP.replicas and set(layout.strategy) <= _KNOWN_TO_DDP
        if has_no_reference and has_ddp:
            try:
                ranks = self._run(layout.devices, run_layout, self._experiment, layout, timeout=self._timeout)
            except Exception as error:
                return Outcome(FAILED, _shown(error))
            failed = next((observed.failure for observed in ranks if observed.failure), None)
            if failed is not None:
                return Outcome(REFUSED if failed.refused else FAILED, _first_line(failed.message))
        elif report.outcome in ("refused", "failed"):
            return Outcome(REFUSED if report.outcome == "refused" else FAILED, reason)
        if report.outcome == "different" and not self._differs_without_noise(layout):
            return Outcome(DRAWS if self._case.draws else PARITY, reference="one process, without noise")
        if report.outcome == "different" and not has_ddp:
            return Outcome(DIFFERENT, reason)
        if has_no_reference or report.outcome == "different":
            first = self._differs_from_ddp(layout)
            if first is not None:
                return Outcome(DIFFERENT, f"{reason}; DDP: {first}")
            against = "DDP"
        demoted = [text for rank in self._last for text in rank.warnings if "sharded instead of pipelined" in text]
        if demoted:
            return Outcome(DEMOTED, _first_line(demoted[0]), against)
        noted = any("draws random numbers" in note for note in report.notes)
        draws = self._case.draws if against == "DDP" else noted
        return Outcome(DRAWS if draws else PARITY, reference=against)

    def _differs_without_noise(self, layout: Layout) -> bool:
        """Whether it still differs where nothing is dropped, and no layer takes statistics.

        Ranks that share a layer draw each for itself, and microbatches otherwise than the whole batch.
        """
        if not _SHARES_LAYERS & set(layout.strategy):
            return True
        splits = {"pipeline_parallel_size", "objective"} & set(layout.strategy)
        without = WithoutNoise(self._case.make_module, statistics=not splits)
        experiment = replace(self._experiment, make_module=without)
        last, path = self._last, self._path
        self._path = path.with_name("without_noise.ckpt")
        try:
            return Verification(experiment, run=self._run, timeout=self._timeout).check(layout).outcome != "same"
        finally:
            self._last, self._path = last, path

    def _differs_from_ddp(self, layout: Layout) -> str | None:
        first = self._last[0].observed
        is_whole = first.shares > 1 and not first.shared
        count = 1 if is_whole else int(layout.strategy.get("num_microbatches", 1))
        try:
            reference = self._of_ddp(count)
            first = self._first_apart(reference, reference)
            return first and self._first_apart(reference, self._of_ddp(count, perturbed=True))
        except Exception as error:
            return f"did not run: {_first_line(f'{type(error).__name__}: {error}')}"

    def _of_ddp(self, count: int, *, perturbed: bool = False) -> list[RunRecord]:
        if (count, perturbed) not in self._ddp:
            arguments = self._experiment, _Replicas(count, perturbed)
            ranks = self._worlds.run(DDP.devices, call_quietly, run_once, arguments, timeout=self._timeout)
            failed = next((observed.failure for observed in ranks if observed.failure), None)
            if failed is not None:
                raise RuntimeError(failed.message)
            self._ddp[count, perturbed] = ranks
        return self._ddp[count, perturbed]

    def _first_apart(self, reference: list[RunRecord], noisy: list[RunRecord]) -> str | None:
        for replica, (theirs, noise) in enumerate(zip(reference, noisy, strict=True)):
            ours = [rank.observed for rank in self._last if rank.observed.replica == replica]
            for difference in compare(ours, theirs, noise, precision=self._experiment.precision):
                # Before a validation all replicas are given the first one's buffers here, and not by DDP.
                if difference.key.what in _OF_DDP and (difference.key.what != "buffer" or replica == 0):
                    return str(difference)
        return None


@dataclass(frozen=True)
class WithoutNoise:
    """Makes a module that drops nothing, and whose layers see each sample alone unless they may take statistics."""

    make_module: Any
    statistics: bool

    def __call__(self) -> Any:
        module = self.make_module()
        if "layerdrop" in module.hparams:
            module.hparams.layerdrop = 0.0
        for inner in list(module.modules()):
            if isinstance(inner, torch.nn.modules.dropout._DropoutNd):
                inner.p = 0.0
            for name, child in list(inner.named_children()):
                if not self.statistics and isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
                    setattr(inner, name, torch.nn.Identity())
        return module


class _AveragedByHand(DDPStrategy):
    """Runs the step once per microbatch and averages gradients after it: torch's wrapper takes one forward."""

    count = 1

    def configure_ddp(self) -> None:
        pass

    def training_step(self, batch: Any, *rest: Any) -> Any:
        parts = zip(*split(batch, self.count), strict=True)
        return sum(self.lightning_module.training_step(part, *rest) * weight for part, weight in parts)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size


class _Perturbs(Callback):
    """Shows what rounding does."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        perturb(pl_module, perturbation(trainer.precision))


class _Replicas(LayoutConnection):
    """Lightning's DDP, over microbatches if there are several."""

    def __init__(self, count: int, perturbed: bool) -> None:
        super().__init__(DDP, None)
        self._count, self._perturbed = count, perturbed

    def strategy(self, pl: Any) -> Any:
        if self._count == 1:
            return super().strategy(pl)
        strategy = _AveragedByHand()
        strategy.count = self._count
        return strategy

    def connect(self, trainer: Any, module: Any) -> None:
        if self._perturbed:
            trainer.callbacks.append(_Perturbs())


# --- on ranks ---------------------------------------------------------------------------------------------------------


@dataclass
class _OnRank:
    observed: RunRecord
    warnings: list[str]


class _Saving(LayoutConnection):
    """Saves a checkpoint after the run, on all ranks as Lightning asks for it."""

    def __init__(self, layout: Layout, num_microbatches: int | None, path: str) -> None:
        super().__init__(layout, num_microbatches)
        self._path = path

    def connect(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer

    def finish(self, observed: RunRecord) -> None:
        try:
            self._trainer.save_checkpoint(self._path)
        except Exception as error:
            # Not caught: the other ranks may wait for this one.
            raise RuntimeError(f"not saved: {_first_line(f'{type(error).__name__}: {error}')}") from error


def observe_and_save(experiment: Experiment, layout: Layout, path: str) -> _OnRank:
    """`run_layout`, with what was warned of and a checkpoint."""
    connection = _Saving(layout, experiment.num_microbatches, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observed = run_once(experiment, connection)
    return _OnRank(observed, [str(warning.message) for warning in caught])


class _Plain(pickle.Unpickler):
    """Finds nothing of this package's."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "lightning_hybrid":
            raise pickle.UnpicklingError(f"the checkpoint holds {module}.{name}")
        return super().find_class(module, name)


class _Stop(Callback):
    """Compares the weights that a run starts with."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state, self.said = state, "the run did not start"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.said = differing(pl_module.state_dict(), self._state)


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Which tensors are not equal, bit for bit; empty if all are."""
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor) and name in found:
            other = found[name].detach().cpu()
            if other.shape != value.shape or not torch.equal(other.nan_to_num(), value.detach().cpu().nan_to_num()):
                return f"AssertionError: {name} is not what was trained"
    return ""


def load_plainly(experiment: Experiment, path: str, weights: dict[str, Any]) -> str:
    """In one process without this package: load, compare, and train one batch more. What is wrong; empty if nothing."""
    try:
        module_of_pickle = types.SimpleNamespace(
            Unpickler=_Plain, load=pickle.load, UnpicklingError=pickle.UnpicklingError, __name__="pickle"
        )
        checkpoint = torch.load(path, map_location="cpu", weights_only=False, pickle_module=module_of_pickle)
        if said := differing(weights, checkpoint["state_dict"]):
            return said
        torch.manual_seed(experiment.seed)
        module, stop = experiment.make_module(), _Stop(checkpoint["state_dict"])
        if experiment.precision == "64-true":
            module.double()  # Lightning loads weights before it makes the module one of float64
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        options = {**experiment.trainer, "max_epochs": experiment.epochs + 1, "limit_val_batches": 1}
        options["callbacks"] = [*options.get("callbacks", ()), stop]
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision=experiment.precision,
            limit_train_batches=1,
            num_sanity_val_steps=0,
            **quiet,
            **options,
        )
        data = experiment.make_data() if experiment.make_data is not None else {}
        arguments = data if isinstance(data, dict) else {"datamodule": data}
        trainer.fit(module, **arguments, ckpt_path=path, weights_only=False)
        return stop.said
    except Exception as error:
        return _shown(error)


def _tensors(observed: RunRecord) -> dict[str, Any]:
    return {**observed.weights, **observed.buffers}


def _shown(error: BaseException) -> str:
    return _first_line(f"{type(error).__name__}: {error}")


def _first_line(text: str) -> str:
    """The first line, or that of the exception which a world's report of its ranks tells of."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "failed first" in "".join(lines[:1]):
        lines = [line for line in lines[1:] if re.match(r"\w+(Error|Exception|Changed|Disagree): ", line)] or lines
    return re.sub(r"^(RuntimeError: )+not saved", "not saved", lines[0]) if lines else ""
