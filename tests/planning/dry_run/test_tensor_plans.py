"""The plans for tensor and context ranks that a dry run shows are those that a fit on real ranks takes."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from harness.fits import Run, fit
from lightning_hybrid.cli.dryrun import print_ranks
from lightning_hybrid.planning.dry_run.ranks import dry_run
from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta
from lightning_hybrid.tensor.proof import narrow as narrowing
from lightning_hybrid.tensor.search.unit import NOT_SEARCHED
from models.cases import Samples, make
from models.hand_written import WIDTH
from models.mixtures import Looped
from models.plain_gpt import Block, PlainGPT

MODELS = ["Llama", "GPT2", "Layers", "Encoder", Looped]  # the last is a mixture
LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence": True},
    "cp2": {"cp": 2},
    "pp2xtp2": {"pp": 2, "tp": 2},
}
BATCH, MICROBATCHES = 4, 2


def dry_run_of(run):
    """What a dry run shows of the first rank."""
    with parameters_on_meta():
        module = make(run.case)
    loader = DataLoader(Samples(module.kind, 4 * BATCH), batch_size=BATCH)
    options = {
        "pipeline_parallel_size": run.pp,
        "tensor_parallel_size": run.tp,
        "context_parallel_size": run.cp,
        "sequence_parallel": run.sequence,
        "num_microbatches": MICROBATCHES,
    }
    content = dry_run(pl, module, {"train_dataloaders": loader}, run.world_size, options, "64-true", lambda _: [0])
    assert content["refused"] is None
    return content


def shown(run):
    """The plans that a dry run shows, as lines by FQN."""
    return dry_run_of(run)["tensor_plans"]


def fitted_lines(run):
    """On a rank: the same of a fit."""
    return {fqn: plan.lines() for fqn, plan in fit(run).plans.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: getattr(case, "__name__", case))
def test_plans_are_those_of_a_fit(worlds, case, layout):
    run = Run(case, **LAYOUTS[layout], batch_size=BATCH, microbatches=MICROBATCHES)
    ranks = worlds.run(run.world_size, fitted_lines, run, timeout=240)
    plans = shown(run)
    assert plans
    assert ranks == [plans] * run.world_size


NARROW = [
    pytest.param(case, layout, marks=[] if (case, layout) == ("Llama", "tp2+sp") else pytest.mark.slow)
    for case in MODELS
    for layout in LAYOUTS
    if "pp" not in layout
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "layout"), NARROW)
def test_plans_are_those_found_on_narrow_copies(monkeypatch, case, layout):
    """Small layers are searched themselves in a run, and on narrow copies or not at all here."""
    run = Run(case, **LAYOUTS[layout])
    expected = shown(run)
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 0)
    plans = shown(run)
    narrow = {fqn: lines for fqn, lines in plans.items() if not any(NOT_SEARCHED in line for line in lines)}
    assert len(narrow) >= len(plans) - 2  # each repeated layer is among them
    assert narrow == {fqn: expected[fqn] for fqn in narrow}


class OtherCodeIfWideBlock(Block):
    def forward(self, x):
        return super().forward(x * 1.0 if self.up.out_features == 4 * WIDTH else x)


class OtherCodeIfWide(PlainGPT):
    block = OtherCodeIfWideBlock


@pytest.mark.filterwarnings("ignore")
def test_layer_without_a_narrow_copy_is_named(monkeypatch, capsys):
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 0)
    content = dry_run_of(Run(OtherCodeIfWide, tp=2))
    [note] = content["notes"]
    assert note.startswith("h.0 and 3 more: left unsharded")
    [line] = content["tensor_plans"]["h.3"]
    difference = "call 0 is mul in the full unit and __get__ in the narrow one"
    assert line.startswith(f"replicated ({NOT_SEARCHED} ({difference})): norm_1.weight")
    print_ranks({"layout": "tp=2", **content}, verbose=False)
    text = capsys.readouterr().out
    assert "h.0 .. h.3 (4)\n" in text
    assert line in text


class OddWidth(pl.LightningModule):
    """Two ranks can shard its layers; of half the width, they could not."""

    kind = "vectors"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 10)).double() for _ in range(2)
        )

    def training_step(self, batch, batch_idx=0):
        x = batch["x"][:, :10]
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_layout_is_refused_only_where_a_run_refuses_it(monkeypatch):
    expected = shown(Run(OddWidth, tp=2))
    monkeypatch.setattr(narrowing, "LEAST_NUMEL", 0)
    found = shown(Run(OddWidth, tp=2))
    note = "searched at full width (no width can be divided)"
    assert {fqn: [line for line in lines if line != note] for fqn, lines in found.items()} == expected
    assert expected["layers.0"][0].startswith("0 -> 2")
