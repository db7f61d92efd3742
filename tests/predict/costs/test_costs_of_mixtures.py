"""Costs of recorded mixtures: experts found as a run shards them, with the FLOPs and rows of the routed tokens."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.experts import ExpertsAdapter, MoE, register_experts
from lightning_hybrid.experts.moe.upcycling import ListedExperts
from lightning_hybrid.experts.parallel import adapters
from lightning_hybrid.planning import costs as strategies_costs
from lightning_hybrid.planning.costs import record_costs
from lightning_hybrid.predict.costs.config import costs_from_config
from lightning_hybrid.predict.costs.module import ROUTING_PROOF
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import PlanLayout, number_format_of
from lightning_hybrid.predict.memory import predict_memory
from lightning_hybrid.predict.search import search_layouts
from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta
from lightning_hybrid.step.recording import recorder
from models.expert_modules import SwappedNames
from models.hand_written import VOCABULARY, WIDTH
from models.mixtures import DeepseekV3, Expert, GptOss, LoopedExperts, Qwen3Moe

pl = importlib.import_module("lightning.pytorch")
TOKENS, BATCH, INNER = 8, 2, 32
MATRICES, GATED = 2 * WIDTH * INNER, 3 * WIDTH * INNER  # parameters of one expert
WITH_BIASES = MATRICES + INNER + WIDTH
TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 16,
}  # fmt: skip
MIDDLE = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "max_position_embeddings": 128,
}  # fmt: skip
LAYOUTS = [
    PlanLayout(batch=2),
    PlanLayout(replicate=4, expert=4, batch=4),
    PlanLayout(shard=4, expert=2, zero_stage=1, batch=4),
    PlanLayout(shard=4, expert=4, zero_stage=3, batch=4),
    PlanLayout(replicate=4, tensor=2, expert=4, batch=4),
    PlanLayout(pipeline=2, replicate=2, expert=2, batch=4),
]


class Step(pl.LightningModule):
    """The step of a model of tokens; the last of its results are the logits."""

    def __init__(self, model, tokens=TOKENS):
        super().__init__()
        self.model, self.tokens = model, tokens

    def training_step(self, batch, batch_idx):
        out = self.model(batch[0])
        logits = getattr(out, "logits", out)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(BATCH, self.tokens, dtype=torch.long)), batch_size=BATCH)


class Layers(nn.Module):
    """Residual mixtures between an embedding and a head."""

    def __init__(self, build, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Residual(build()) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, hidden):
        out = self.inner(self.norm(hidden))
        return hidden + (out[0] if isinstance(out, tuple) else out)


class LoopOverChosenExperts(LoopedExperts):
    """Loops over the experts that some token chose, whose numbers it reads; returns the router's logits too."""

    def forward(self, hidden):
        shape, hidden = hidden.shape, hidden.view(-1, WIDTH)
        logits = self.gate(hidden)
        weights, chosen = torch.topk(F.softmax(logits, dim=1), self.top_k, dim=-1)
        out = torch.zeros_like(hidden)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            place, token = torch.where(mask[number])
            out.index_add_(0, token, self.experts[number](hidden[token]) * weights[token, place, None])
        return out.view(shape), logits


class Jittered(LoopedExperts):
    """Draws, and writes to its input."""

    def forward(self, hidden):
        hidden *= torch.empty_like(hidden).uniform_(0.9, 1.1)
        return super().forward(hidden)


class SplitByCounts(nn.Module):
    """Rows sorted by expert, and their counts, for a list of experts that splits them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = ListedExperts([Expert() for _ in range(4)], takes_rows=True)

    def forward(self, hidden):
        tokens = hidden.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        rows = self.experts(tokens[order], chosen.bincount(minlength=4)) * weights[order, None]
        return torch.zeros_like(tokens).index_add(0, order, rows).view(hidden.shape)


def mixtral(implementation, sizes):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        bos_token_id=0, eos_token_id=0, experts_implementation=implementation, **sizes
    )  # fmt: skip
    with parameters_on_meta():
        return config, Step(transformers.MixtralForCausalLM(config), config.max_position_embeddings)


def recorded(model):
    return record_costs(pl, Step(model), {}, "32-true").costs


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("sizes", [TINY, MIDDLE], ids=["tiny", "middle"])
def test_recorded_mixtral_costs_what_its_configuration_does(implementation, sizes):
    config, module = mixtral(implementation, sizes)
    expected = costs_from_config(config.to_dict(), config.max_position_embeddings)
    costs = record_costs(pl, module, {}, "32-true").costs
    assert (costs.routes, costs.heads, costs.key_value_heads) == (
        *(expected.routes, expected.heads, expected.key_value_heads),
    )
    assert costs.parameters == pytest.approx(expected.parameters, rel=0.03)
    assert costs.flops == pytest.approx(expected.flops, rel=0.03)
    layer = expected.layers[1]
    found = [each for each in costs.single_layers() if each.routed_tokens]
    assert [(each.routed_parameters, each.routed_tokens) for each in found] == layer.count * [
        (layer.routed_parameters, layer.routed_tokens)
    ]
    of_experts = [product.flops for product in found[-1].products][-2:]
    assert of_experts == [product.flops for product in layer.products][-2:]
    number_format, hardware = number_format_of("32-true"), load_hardware("h100")
    for layout in LAYOUTS:
        own, other = (predict_memory(each, layout, number_format, hardware).peak for each in (costs, expected))
        assert own == pytest.approx(other, rel=0.03), layout


def test_module_is_planned_as_its_configuration():
    sizes = {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8, "max_position_embeddings": 2048,
    }  # fmt: skip
    config, module = mixtral("grouped_mm", sizes)
    costs = record_costs(pl, module, {}, "bf16-mixed").costs
    expected = costs_from_config(config.to_dict(), config.max_position_embeddings)
    arguments = number_format_of("bf16-mixed"), load_hardware("h100"), 8
    for fixed in ({}, {"expert": 4}):
        own, other = (search_layouts(each, *arguments, batch=64, fixed=fixed) for each in (costs, expected))
        assert own.best.layout == other.best.layout and own.best.layout.expert == fixed.get("expert", 1)


def test_loops_over_experts_are_recorded_without_values(monkeypatch):
    """No weight of an expert gets storage, and what a layer saves is known."""

    def refuse(*_):
        raise AssertionError("a unit runs on real values")

    monkeypatch.setattr(recorder, "run_event_on_stand_ins", refuse)
    modules = (mixtral(implementation, TINY)[1] for implementation in ("eager", "grouped_mm"))
    loop, grouped = (record_costs(pl, module, {}, "32-true").costs for module in modules)
    assert loop.flops == grouped.flops
    saved = [sum(each.saved for each in costs.single_layers()) for costs in (loop, grouped)]
    assert saved[0] == pytest.approx(saved[1], rel=0.1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("build", "experts", "rows", "of_one"),
    [
        (LoopedExperts, 4, 2 * TOKENS, WITH_BIASES),
        (LoopOverChosenExperts, 4, 2 * TOKENS, WITH_BIASES),
        (Jittered, 4, 2 * TOKENS, WITH_BIASES),
        (SplitByCounts, 4, TOKENS, WITH_BIASES),
        (lambda: MoE(WIDTH, INNER, num_experts=6), 6, 2 * TOKENS, GATED),
        (lambda: MoE(WIDTH, INNER, num_experts=4, gated=False, bias=True), 4, 2 * TOKENS, WITH_BIASES),
        (lambda: MoE(WIDTH, INNER, num_experts=4, capacity_factor=1.0, overflow="pad"), 4, 2 * TOKENS, GATED),
        (lambda: MoE(WIDTH, INNER, num_experts=4, router="expert_choice"), 4, 2 * TOKENS, GATED),
    ],
    ids=[
        "loop",
        "loop over chosen",
        "draws",
        "split by counts",
        "own layer",
        "with biases",
        "capacity",
        "expert choice",
    ],
)
def test_experts_of_hand_written_layers(build, experts, rows, of_one):
    costs = recorded(Layers(build))
    layers = [layer for layer in costs.single_layers() if layer.routed_tokens]
    assert costs.routes == experts and ROUTING_PROOF in costs.notes
    assert [(layer.routed_tokens, layer.routed_parameters) for layer in layers] == 2 * [(rows, experts * of_one)]
    matrices = of_one - (INNER + WIDTH if of_one == WITH_BIASES else 0)
    products = [product for product in layers[0].products if product.rows == rows and product.columns > experts]
    assert sum(product.flops for product in products) == 2 * rows * matrices
    assert layers[0].saved > rows * INNER
    assert costs.parameters == sum(parameter.numel() for parameter in Layers(build).parameters())


@pytest.mark.parametrize(("case", "experts", "top_k"), [(Qwen3Moe, 8, 3), (DeepseekV3, 8, 2), (GptOss, 4, 2)])
def test_experts_of_transformers(case, experts, top_k):
    pytest.importorskip("transformers")
    costs = recorded(case().model)
    layers = [layer for layer in costs.single_layers() if layer.routed_tokens]
    assert costs.routes == experts and {layer.routed_tokens for layer in layers} == {top_k * TOKENS}
    names = [name for name, _ in case().named_parameters()]
    of_experts = [name for name in names if ".mlp.experts." in name]
    sizes = dict(case().named_parameters())
    assert sum(layer.routed_parameters for layer in layers) == sum(sizes[name].numel() for name in of_experts)


class Stacked(nn.Module):
    """A router before a module of stacked experts that is called with gates, tokens and the chosen experts."""

    def __init__(self, build):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), build()

    def forward(self, hidden):
        tokens = hidden.reshape(-1, WIDTH)
        gates, chosen = self.gate(tokens).topk(2)
        return self.experts(gates, tokens, choice=chosen).view(hidden.shape)


class OtherNames(SwappedNames):
    def __init__(self):
        super().__init__()
        self.width = WIDTH
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH, INNER)), nn.Parameter(torch.randn(4, INNER, WIDTH))


class ThreeProducts(OtherNames):
    """No MLP that could be replaced: it runs on real values."""

    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, gate, tokens, *, choice):
        out = super().forward(gate, tokens, choice=choice)
        for number in range(self.count):
            row, _ = (choice == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, tokens[row] @ self.c[number])
        return out


@pytest.mark.parametrize(
    ("build", "of_one"), [(OtherNames, 2 * WIDTH * INNER), (ThreeProducts, 2 * WIDTH * INNER + WIDTH**2)]
)
def test_loops_over_stacked_experts(build, of_one):
    costs = recorded(Layers(lambda: Stacked(build)))
    layers = [layer for layer in costs.single_layers() if layer.routed_tokens]
    assert costs.routes == 4
    assert [(layer.routed_parameters, layer.routed_tokens) for layer in layers] == 2 * [(4 * of_one, 2 * TOKENS)]
    router = 2 * TOKENS * WIDTH * 4
    assert [layer.flops for layer in layers] == pytest.approx(2 * [4 * TOKENS * of_one + router])


def test_different_numbers_of_experts_have_a_common_divisor():
    numbers = iter([4, 6])
    costs = recorded(Layers(lambda: LoopedExperts(next(numbers))))
    assert costs.routes == 2


class Tower(nn.Module):
    """Modules that all get all rows, and heads that get each some of them: no experts."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden):
        for step in self.steps:
            hidden = step(hidden)
        return sum(head(hidden[:, number:]).mean(1, keepdim=True) for number, head in enumerate(self.heads))


class EarlyExit(nn.Module):
    """Each module of a list gets the rows that those before it have left active."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden):
        rows = hidden.reshape(-1, WIDTH)
        for step in self.steps:
            active = (rows.mean(-1) > 0).nonzero()[:, 0]
            rows = rows.index_add(0, active, step(rows[active]))
        return rows.view(hidden.shape)


@pytest.mark.parametrize("build", [Tower, EarlyExit])
def test_lists_that_are_no_experts(build):
    costs = recorded(Layers(build))
    assert costs.routes == 0 and ROUTING_PROOF not in costs.notes
    assert not any(layer.routed_parameters or layer.routed_tokens for layer in costs.layers)


def test_tied_experts_are_no_experts():
    """A run replicates those that share a parameter with another layer."""
    model = Layers(LoopedExperts)
    first, second = (layer.inner.experts[0] for layer in model.layers)
    first.up.weight = second.up.weight
    assert recorded(model).routes == 0


def test_experts_of_a_registered_adapter(monkeypatch):
    class Other(nn.Module):
        """Takes tokens and a number for each."""

        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

        def forward(self, tokens, numbers):
            return torch.bmm(tokens[:, None], self.a[numbers])[:, 0]

    class Adapter(ExpertsAdapter):
        what = "tokens, each with the number of its expert"
        placements = example = run = compute = None  # of a run

        @classmethod
        def recognise(cls, module, call):
            return [cls(4)] if isinstance(module, Other) else []

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.other = nn.Linear(WIDTH, 4), Other()

        def forward(self, hidden):
            tokens = hidden.reshape(-1, WIDTH)
            return self.other(tokens, self.gate(tokens).argmax(-1)).view(hidden.shape)

    monkeypatch.setattr(adapters, "_ADAPTERS", list(adapters._ADAPTERS))
    register_experts(Adapter)
    costs = recorded(Layers(Routed))
    assert costs.routes == 4 and {layer.routed_tokens for layer in costs.layers} == {0.0, TOKENS}


def test_plans_have_expert_ranks_and_say_why_not():
    costs = recorded(Layers(LoopedExperts))
    arguments = costs, number_format_of("32-true"), load_hardware("h100")
    assert search_layouts(*arguments, 8, batch=16, fixed={"expert": 4}).best.layout.expert == 4
    [rejection] = rejections(costs)
    assert rejection.layout.expert > 1 and f"ep={rejection.layout.expert}" in rejection.reason
    [rejection] = rejections(recorded(Layers(Tower)))
    assert rejection.reason == "the model has no experts"


def rejections(costs):
    """Of expert ranks."""
    found = search_layouts(costs, number_format_of("32-true"), load_hardware("h100"), 8, batch=16).rejected
    return [each for each in found if each.family == "expert ranks"]


def test_experts_of_a_step_that_is_not_recorded_are_not_known(monkeypatch):
    monkeypatch.setattr(strategies_costs, "record_in_one_stage", lambda *_: None)
    costs = recorded(Layers(LoopedExperts))
    [rejection] = rejections(costs)
    assert rejection.reason == "the step was not recorded, so that its experts are not known; fix their ranks"
