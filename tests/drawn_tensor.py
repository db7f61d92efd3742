"""What comes of a drawn architecture on two tensor ranks: its numbers, and how much of its layers is cut."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cut_noted import Cut, Noting, NotesCut
from drawn_runs import data_of, module_of, precision_of

from lightning_hybrid.verify import Experiment, Layout, Verification

TENSOR = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
_OUTCOMES = {"same": "parity", "refused": "refused", "failed": "failed", "different": "wrong"}


@dataclass(frozen=True)
class TensorTrial:
    """One architecture on two tensor ranks.

    Attributes:
        outcome: "parity"; "refused" with an error of ours; "failed" with another; or "wrong" numbers.
        message: Why, for all but parity.
        precision: As Lightning spells it.
        cut: What became of its weights.
    """

    outcome: str
    message: str
    precision: str
    cut: Cut


def tensor_trial(class_name: str, run: Callable[..., Any]) -> TensorTrial:
    """Train two steps by a Trainer, against one process; no sample is apart from the others in a microbatch.

    Args:
        class_name: Of transformers.
        run: Runs functions on ranks, as ``Worlds.run``.
    """
    [precision] = run(1, quietly, precision_of, (class_name,), timeout=120)

    def run_quietly(n: int, function: Callable[..., Any], /, *args: Any, timeout: float) -> list[Any]:
        return run(n, quietly, function, args, timeout=timeout)

    noting = Noting(run_quietly)
    experiment = Experiment(
        make_module=functools.partial(module_of, class_name),
        make_data=functools.partial(data_of, class_name),
        steps=2,
        num_microbatches=1,
        precision=precision,
        trainer={"callbacks": [NotesCut()]},
    )
    report = Verification(experiment, run=noting, timeout=120).check(TENSOR)
    return TensorTrial(_OUTCOMES[report.outcome], report.message, precision, noting.cut)


def quietly(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call it; what is printed and warned is not what this is about."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return function(*args)
