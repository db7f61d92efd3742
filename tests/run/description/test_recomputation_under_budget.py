"""The start table with a budget of recomputation: the share that is expected to be recomputed, and its memory."""

import importlib

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.recompute.budget import BudgetedLayers
from lightning_hybrid.planning.plan import make_plan
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.techniques.recompute import expected_recomputation
from models.cases import Samples, make
from models.hand_written import Layers

pl = importlib.import_module("lightning.pytorch")


def memory(activations):
    return RankMemory(parameters=10, gradients=10, optimizer_states=20, activations=activations)


def expected(nbytes, floor=(5, 3), full=(45, 13), ranks=2):
    budget = BudgetedLayers(torch.device("cpu"), lambda before: nbytes)
    return expected_recomputation(
        budget, [memory(each) for each in floor], [memory(each) for each in full], lambda stage: stage % ranks
    )


@pytest.mark.parametrize(
    ("nbytes", "shares", "activations", "words"),
    [
        (100, [0.0, 0.0], [45, 13], "0 % of what they save, as estimated"),
        (55, [0.75, 0.0], [15, 13], "0 to 75 % of what they save, as estimated"),
        (30, [1.0, 1.0], [5, 3], "100 % of what they save, as estimated"),
    ],
)
def test_share_of_each_rank(nbytes, shares, activations, words):
    found = expected(nbytes)
    assert found.shares == pytest.approx(shares)
    assert [stage.activations for stage in found.memory] == activations
    assert str(found) == words


def test_stages_of_one_rank_share_its_budget():
    found = expected(113, ranks=1)
    assert found.shares == pytest.approx([0.5]) and [stage.activations for stage in found.memory] == [25, 8]


def test_what_is_not_known():
    assert expected(55, floor=(5, None)) is None

    def unknown(before):
        raise RecomputeError("the free memory of cpu is unknown", entry="recompute-budget")

    budget = BudgetedLayers(torch.device("cpu"), unknown)
    assert expected_recomputation(budget, [memory(5)], [memory(45)], lambda stage: 0) is None


@pytest.mark.filterwarnings("ignore")
def test_start_table():
    def table(recompute, stages):
        options = {"pipeline_parallel_size": stages, "recompute": recompute, "num_microbatches": 4}
        loader = DataLoader(Samples(Layers.kind, 64), batch_size=32)
        return make_plan(pl, make(Layers), {"train_dataloaders": loader}, stages, options, "32-true").table

    def activations(text):
        return [line.split("activations")[1] for line in text.splitlines() if "activations" in line]

    wide, none = table("1GB", 2), table(None, 2)
    assert "recomputed in the backward as recompute='1GB' needs it: " in wide
    assert "; 0 % of what they save, as estimated" in wide
    assert activations(wide) == activations(none) != []
    assert "; 100 % of what they save, as estimated" in table("1B", 2)
    assert "; the share is printed once the optimizer has stepped twice" in table("1GB", 1)
