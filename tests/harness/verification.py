"""Runs small modules under every layout and compares them with one process: `check(worlds, make_module, layout)`.

A new layout or strategy joins all tests by one line in `lightning_hybrid.verify.LAYOUTS`.
"""

import contextlib
import io
import warnings

from harness.layouts import under
from lightning_hybrid.verify import LAYOUTS, Experiment, Layout, Verification
from models.regression import regression_data

STAGES = LAYOUTS[0]
REPLICAS = LAYOUTS[1]
BOTH = LAYOUTS[2]

__all__ = [
    "COMBINED",
    "LAYOUTS",
    "TENSOR",
    "check",
    "check_there_and_back",
    "regression_data",
    "verifications",
]

# Replicas of stages, several on each rank: covers all others, so long lists of modules run under it alone by default.
COMBINED = Layout("dp2 x pp2 x 2 stages", devices=4, strategy={"pipeline_parallel_size": 2, "stages_per_rank": 2})
# Two tensor ranks in each of two stages.
TENSOR = Layout("pp2 x tp2", devices=4, strategy={"pipeline_parallel_size": 2, "tensor_parallel_size": 2})
verifications = {}  # references are run once per experiment and split of the data


def check(worlds, make_module, layout, *, make_data=regression_data, steps=2, timeout=60, resume=False, **options):
    """The report of one module under one layout; `options` are those of `Experiment`.

    A checkpoint and a resumed step take as long again: `resume=True` where they are what a test is about.
    """
    key = make_module, make_data, steps, resume, repr(sorted(options.items()))
    if key not in verifications:
        experiment = Experiment(make_module=make_module, make_data=make_data, steps=steps, resume=resume, **options)
        verifications[key] = Verification(experiment, run=_Quiet(worlds), timeout=timeout)
    return verifications[key].check(layout)


def check_there_and_back(worlds, make_module, layout, **options):
    """The same for changing steps: the third one equals the first."""
    return check(worlds, make_module, layout, **{"steps": 3, **options})


class _Quiet:
    """Runs on a world, without Lightning's output and warnings."""

    def __init__(self, worlds):
        self._worlds = worlds

    def __call__(self, n, function, /, *args, timeout):
        return self._worlds.run(n, call_quietly, function, args, timeout=timeout)


def call_quietly(function, args):
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return function(*args)


all_layouts = under([*LAYOUTS, COMBINED])
