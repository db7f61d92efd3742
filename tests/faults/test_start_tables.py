"""The line of estimated memory claims a bound only where activations are counted; budgets of what was measured run."""

import importlib
from dataclasses import replace

import pytest
import torch
from faults import attention_modules as a
from faults import small_modules as s
from faults.layouts import LAYOUTS
from run.test_recompute_budget import LARGE, PeakAndReport, with_budget

from harness.fits import fit
from lightning_hybrid.planning.plan import make_plan

pl = importlib.import_module("lightning.pytorch")


class Branches(s.Small):
    """Branches on a value: no stages run it."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 3 else loss


def memory_line(make, loaders, size, options):
    torch.manual_seed(0)
    [loader] = loaders(0, 1)
    table = make_plan(pl, make().double(), {"train_dataloaders": loader}, size, dict(options), "64-true").table
    [line] = [line for line in table.splitlines() if "estimated memory per rank:" in line]
    return line


SLOW = [(module, layout) for module in (Branches, s.Small, a.Grouped) for layout in LAYOUTS]
DEFAULT = [(Branches, "pp2"), (s.Small, "zero3"), (s.Small, "pp2")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "layout"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in DEFAULT)],
)
def test_a_bound_has_activations(module, layout):
    size, _, options = LAYOUTS[layout]
    line = memory_line(module, a.texts if module is a.Grouped else s.of_numbers((2, 8)), size, options)
    in_stages = module is not Branches and "pipeline_parallel_size" in options
    assert ("up to" in line) == in_stages == ("activations in flight" in line), line
    assert ("the first step measures activations" in line) != in_stages, line


class Peaks(PeakAndReport):
    def on_train_end(self, trainer, pl_module):
        pass  # recompute="full" has no report


MEASURED = replace(LARGE, callback=Peaks)
RUNS = {
    "dp2": replace(MEASURED, dp=2, microbatches=1),
    "zero3 layerwise": replace(MEASURED, dp=2, strategy={"zero_stage": 3, "reshard_after_forward": True}),
    "pp2": replace(MEASURED, microbatches=4, pp=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RUNS)
def test_a_budget_of_what_full_recomputation_takes(worlds, layout):
    run = RUNS[layout]
    highest = 0
    for budget in ("full", None):
        given = with_budget(run, budget or f"{int(1.02 * highest)}B")
        peaks = [max(rank.extra["peaks"]) for rank in worlds.run(run.world_size, fit, given, timeout=180)]
        assert budget == "full" or max(peaks) <= 1.02 * highest, (peaks, highest)
        highest = max(peaks)
