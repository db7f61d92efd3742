"""Detection of experts in unmodified models: what is recognised, what is proved, what is not an expert."""

import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.experts.moe.grouped import GroupedExperts
from lightning_hybrid.experts.moe.upcycling import ListedExperts
from lightning_hybrid.experts.parallel.adapters import BatchedPairs, BatchedRows, ExpertList
from lightning_hybrid.experts.parallel.find import ExpertCalls
from lightning_hybrid.experts.parallel.proof import ExpertsProof
from lightning_hybrid.planning.costs import record_costs
from models.cases import batch_of, make
from models.expert_modules import Around, SwappedNames, rows_of
from models.mixtures import WIDTH, LoopedExperts, Mixtral
from models.sampled.architectures import Unavailable
from models.sampled.architectures import make as make_drawn


def found_in(root, call, size=2):
    calls = ExpertCalls()
    torch.manual_seed(0)
    with calls.watching(dict(root.named_children())):
        call()
    return calls.find(root, size)


class Jittered(LoopedExperts):
    """Draws, writes to its input and counts: once for each forward of the user's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        self.seen += 1
        hidden *= torch.empty_like(hidden).uniform_(0.9, 1.1)
        return super().forward(hidden)


class Heads(nn.Module):
    """A list of modules, each on the same rows: no experts."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        return sum(step(hidden) for step in self.steps)


class Layers(Heads):
    """Each on the previous output."""

    def forward(self, hidden):
        for step in self.steps:
            hidden = torch.tanh(step(hidden))
        return hidden


class Chained(Heads):
    """Each on some rows of the previous output."""

    def forward(self, hidden):
        for number, step in enumerate(self.steps):
            rows = step(hidden[number:])
            hidden = torch.cat([hidden[:number], torch.tanh(rows)])
        return hidden


CASES = {
    "a list": (LoopedExperts, lambda m: m(rows_of(2, 7, WIDTH)), ExpertList),
    "a list that draws and counts": (Jittered, lambda m: m(rows_of(2, 7, WIDTH)), ExpertList),
    "a list of which each gets all rows": (
        lambda: LoopedExperts(4, top_k=4),
        lambda m: m(rows_of(2, 7, WIDTH)),
        ExpertList,
    ),
    "copies of a layer": (
        lambda: ListedExperts([nn.Linear(WIDTH, WIDTH) for _ in range(4)], takes_rows=True),
        lambda m: m(rows_of(9, WIDTH), torch.tensor([4, 0, 3, 2])),
        ExpertList,
    ),
    "moe layer": (
        lambda: GroupedExperts(4, WIDTH, 8, bias=True),
        lambda m: m(rows_of(9, WIDTH), torch.tensor([4, 0, 3, 2])),
        BatchedRows,
    ),
    "other names": (
        SwappedNames,
        lambda m: m(torch.rand(6, 2), rows_of(6, 4), choice=torch.randint(4, (6, 2))),
        BatchedPairs,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("size", [2, 4])
def test_experts_are_recognised_and_proved(case, size):
    build, call, kind = CASES[case]
    root = Around(build())
    found = found_in(root, lambda: call(root), size)
    assert {fqn: type(adapter) for fqn, adapter in found.adapters.items()} == {"inner": kind}
    assert not found.replicated


@pytest.mark.parametrize("kind", [Heads, Layers])
def test_layers_are_no_experts(kind):
    root = Around(kind())
    found = found_in(root, lambda: root(rows_of(9, WIDTH)))
    assert not found.adapters and not found.replicated


def test_non_experts_are_not_recognised():
    root = Around(Chained())
    found = found_in(root, lambda: root(rows_of(9, WIDTH)))
    assert not found.adapters
    reason = found.replicated["inner"]
    assert "depend on the results of other experts" in reason or "differs by" in reason


@pytest.mark.parametrize("fault", ["wrong rows", "weights twice", "too many"])
def test_planted_faults_fail_the_proof(monkeypatch, fault):
    root = make(Mixtral)
    [(fqn, adapter), *_] = found_in(root, lambda: root.loss(batch_of("tokens", range(4)))).adapters.items()
    module = root.get_submodule(fqn)
    tokens = torch.zeros(3, WIDTH), torch.zeros(3, 2).long(), torch.zeros(3, 2)
    assert not ExpertsProof(module, adapter, (tokens, {}), 2).why_not_equivalent()
    compute = type(adapter).compute
    faults = {
        "wrong rows": lambda self, m, f, rows, counts, first: compute(self, m, f, rows, counts[::-1], first),
        "weights twice": lambda self, m, f, rows, counts, first: 2 * compute(self, m, f, rows, counts, first),
        "too many": lambda self, m, f, rows, counts, first: compute(self, m, f, rows.detach(), counts, first),
    }
    monkeypatch.setattr(type(adapter), "compute", faults[fault])
    assert "differs by" in ExpertsProof(module, adapter, (tokens, {}), 2).why_not_equivalent()


def mixtures():
    """Classes with a causal head whose configuration speaks of experts."""
    from transformers.models.auto import configuration_auto, modeling_auto

    for name, found in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            config = configuration_auto.CONFIG_MAPPING[name]().to_dict()
        except Exception:
            continue
        if any(re.search(r"experts?$|_experts_.*num$", key) for key in config):
            yield found if isinstance(found, str) else found[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")
def test_transformers_mixtures():
    """What a plan of each has found in its recorded step is what is proved."""
    shared, others = [], []
    for name in mixtures():
        try:
            module, batch = make_drawn(name)
        except Unavailable:
            continue
        found = found_in(module, lambda module=module, batch=batch: module.training_step(batch, 0))
        (shared if found.adapters else others).append(name)
        samples = [{key: value[row] for key, value in batch.items()} for row in range(len(batch["input_ids"]))]
        loader = DataLoader(samples, batch_size=len(samples))
        costs = record_costs(
            pl, module, dict.fromkeys(("train_dataloaders", "val_dataloaders"), loader), "64-true"
        ).costs
        assert {costs.routes} - {0} == {adapter.num_experts for adapter in found.adapters.values()}, name
        assert all(layer.routed_tokens for layer in costs.layers if layer.routed_parameters)
    print(f"{len(shared)} of {len(shared) + len(others)}; not {', '.join(others)}")
    assert len(shared) >= 0.9 * (len(shared) + len(others))
