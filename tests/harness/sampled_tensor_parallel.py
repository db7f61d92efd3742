"""Outcome of a sampled architecture on two tensor ranks: its parity, and the fraction of its layers that is sharded."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.sharded_fraction import RecordingRun, RecordsFraction, ShardedFraction
from lightning_hybrid.verify import Experiment, Layout, Report, Verification
from models.sampled.modules import data_of, module_of, precision_of

TENSOR = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
TIMEOUT_SECONDS = 240
_ROUNDING_INSIDE = 1e-6
_OUTCOMES = {"same": "parity", "refused": "refused", "failed": "failed", "different": "wrong"}


@dataclass(frozen=True)
class TensorTrial:
    """One architecture on two tensor ranks.

    Attributes:
        outcome: "parity"; "refused" with an error of this package; "failed" with another; or "wrong" numbers.
        message: Why, for all but parity.
        precision: As Lightning spells it.
        cut: The fractions of its weights.
    """

    outcome: str
    message: str
    precision: str
    cut: ShardedFraction


def tensor_trial(class_name: str, run: Callable[..., Any]) -> TensorTrial:
    """Train two steps by a Trainer, against one process.

    Args:
        class_name: Of transformers.
        run: Runs functions on ranks, as ``Worlds.run``.
    """
    [precision] = run(1, quietly, precision_of, (class_name,), timeout=TIMEOUT_SECONDS)
    report, cut = _verified(class_name, precision, run)
    # What is float64 outside may be float32 inside: then the last digits of a float64 depend on the order of sums.
    if precision == "64-true" and report.first is not None and report.first.difference < _ROUNDING_INSIDE:
        precision = "32-true"
        report, cut = _verified(class_name, precision, run)
    return TensorTrial(_OUTCOMES[report.outcome], report.message, precision, cut)


def _verified(class_name: str, precision: str, run: Callable[..., Any]) -> tuple[Report, ShardedFraction]:
    def run_quietly(n: int, function: Callable[..., Any], /, *args: Any, timeout: float) -> list[Any]:
        return run(n, quietly, function, args, timeout=timeout)

    recording_run = RecordingRun(run_quietly)
    experiment = Experiment(
        make_module=functools.partial(module_of, class_name),
        make_data=functools.partial(data_of, class_name),
        steps=2,
        num_microbatches=1,
        precision=precision,
        trainer={"callbacks": [RecordsFraction()]},
        resume=False,
    )
    return Verification(experiment, run=recording_run, timeout=TIMEOUT_SECONDS).check(TENSOR), recording_run.cut


def quietly(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call it without output and warnings."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return function(*args)
