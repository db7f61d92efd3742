"""Costs of unmodified modules: of their recorded steps, of their parameters alone, and of configurations."""

import copy
import importlib
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_hybrid.planning import costs as strategies_costs
from lightning_hybrid.planning.costs import record_costs, tensors_of_datasets
from lightning_hybrid.predict.costs.config import costs_from_config, shape_from_config
from lightning_hybrid.predict.costs.module import costs_from_parameters, costs_from_step_graph
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS
from lightning_hybrid.predict.search import search_layouts
from models import command_line_classes

pl = importlib.import_module("lightning.pytorch")
WIDTH, TOKENS, WORDS, BATCH, LAYERS = 32, 16, 64, 4, 3
CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


class _Tokens(Dataset):
    def __len__(self):
        return 2 * BATCH

    def __getitem__(self, index):
        return torch.arange(TOKENS) % WORDS


class LanguageModel(pl.LightningModule):
    """An encoder of equal layers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch, batch_idx):
        hidden = self.embedding(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(_Tokens(), batch_size=BATCH)


@pytest.fixture(scope="module")
def recorded():
    return record_costs(pl, LanguageModel(), {}, "32-true")


def test_recorded_step(recorded):
    module, costs = LanguageModel(), recorded.costs
    assert recorded.samples == BATCH and costs.positions == TOKENS and costs.is_traced
    assert costs.parameters == sum(parameter.numel() for parameter in module.parameters())
    linear = LAYERS * (4 * WIDTH**2 + 8 * WIDTH**2) + WIDTH * WORDS
    attention = LAYERS * 2 * TOKENS * WIDTH
    assert costs.flops == pytest.approx(2 * TOKENS * (linear + attention), rel=0.02)
    # Momentum is one state of 4 bytes.
    assert recorded.number_format.state == pytest.approx(4, rel=0.01)


def test_recorded_layers(recorded):
    encoder = max(recorded.costs.layers, key=lambda layer: layer.flops * layer.count)
    weights = [product for product in encoder.products if product.has_weight]
    assert sorted((product.inner, product.columns) for product in weights) == sorted(
        [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    )
    assert all(product.rows == pytest.approx(TOKENS) for product in weights)
    assert [product.is_attention for product in encoder.products if not product.has_weight] == [True]
    assert encoder.outputs == TOKENS * WIDTH
    assert encoder.saved > encoder.selective_saved > 0
    assert recorded.costs.num_layers >= LAYERS + 2
    full = [layer.has_full_positions for layer in recorded.costs.layers]  # context ranks divide the encoders alone
    assert full[0] and full[-1] and not encoder.has_full_positions


def test_step_that_cannot_be_recorded_is_planned_from_parameters(monkeypatch):
    monkeypatch.setattr(strategies_costs, "record_in_one_stage", lambda *_: None)
    costs = record_costs(pl, LanguageModel(), {}, "32-true").costs
    assert not costs.is_traced and "the step was not recorded" in costs.notes[0]
    assert costs.parameters == sum(parameter.numel() for parameter in LanguageModel().parameters())


def test_costs_of_parameters():
    shapes = {name: tuple(parameter.shape) for name, parameter in LanguageModel().named_parameters()}
    costs = costs_from_parameters(shapes, positions=TOKENS, reason="a reason")
    assert not costs.is_traced and "(a reason)" in costs.notes[0]
    matrices = sum(parameter.numel() for parameter in LanguageModel().parameters() if parameter.dim() > 1)
    assert costs.flops == 2 * TOKENS * matrices
    assert [layer.count for layer in costs.layers if layer.name.startswith("layers.")] == [LAYERS]
    assert costs.parameters == sum(parameter.numel() for parameter in LanguageModel().parameters())


def test_frozen_parameters():
    class Frozen(command_line_classes.Stack):
        def __init__(self):
            super().__init__()
            self.head.requires_grad_(False)

    costs = record_costs(pl, Frozen(), {}, "bf16-mixed").costs
    assert costs.frozen_parameters == sum(parameter.numel() for parameter in Frozen().head.parameters())


def test_parameters_that_the_step_does_not_read():
    """They take memory; frozen ones are not more than all of them."""

    class WithTeacher(LanguageModel):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Linear(1024, 1024).requires_grad_(False)

    module = WithTeacher()
    costs = record_costs(pl, module, {}, "32-true").costs
    assert costs.parameters == sum(parameter.numel() for parameter in WithTeacher().parameters())
    assert costs.frozen_parameters == 1024 * 1025 < costs.parameters


class OneSequential(LanguageModel):
    """All of its layers are in one ``nn.Sequential``, none of which is recomputed by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.layers(self.embedding(batch))).flatten(0, 1), batch.flatten())


def test_layers_of_one_sequential_are_shared_among_stages():
    costs = record_costs(pl, OneSequential(), {}, "32-true").costs
    assert costs.num_layers == 8
    assert costs.flops == pytest.approx(2 * TOKENS * (6 * WIDTH**2 + WIDTH * WORDS), rel=0.02)


def test_tensors_of_datasets_are_not_copied():
    tensors = torch.zeros(8, 2), torch.zeros(8)
    loader = DataLoader(Subset(TensorDataset(*tensors), range(4)), generator=torch.Generator())
    copied = copy.deepcopy(loader, tensors_of_datasets({"a": loader}))
    assert copied.dataset is not loader.dataset and copied.generator is not loader.generator
    assert copied.dataset.dataset.tensors[0] is tensors[0] and copied.dataset.dataset.tensors[1] is tensors[1]


class HoldsData(pl.LightningDataModule):
    def __init__(self, dataset):
        super().__init__()
        self.parts, self.mean = {"train": dataset}, torch.zeros(2)


def test_tensors_of_datasets_of_a_data_module_are_not_copied():
    dataset = TensorDataset(torch.zeros(8, 2))
    datamodule = HoldsData(dataset)
    copied = copy.deepcopy(datamodule, tensors_of_datasets(datamodule))
    assert copied.parts["train"] is not dataset and copied.parts["train"].tensors[0] is dataset.tensors[0]
    assert copied.mean is not datamodule.mean


class Recurrent(LanguageModel):
    """Layers that tensor ranks do not shard, beside two linears that they do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(LAYERS))

    def training_step(self, batch, batch_idx):
        hidden = self.embedding(batch)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())


def test_parameters_that_tensor_ranks_do_not_shard():
    costs = record_costs(pl, Recurrent(), {}, "32-true").costs
    embedding, *layers, head = costs.layers
    assert sum(layer.count for layer in layers) == LAYERS
    for layer in layers:
        assert layer.sharded_parameters == layer.reductions == 0
        assert not any(product.sharded for product in layer.products)
        assert layer.replicated_saved == layer.saved > 0 and layer.replicated_moved == layer.moved > 0
    assert embedding.sharded_parameters == head.sharded_parameters == WORDS * WIDTH
    result = search_layouts(costs, FORMATS["32-true"], load_hardware("cpu"), 2, batch=BATCH)
    assert all(plan.layout.tensor == 1 for plan in result.plans)
    reasons = {rejection.family: rejection.reason for rejection in result.rejected}
    assert re.match(r"tensor ranks would share \d+% of the FLOPs", reasons["tensor ranks within a node"])
    dense = record_costs(pl, LanguageModel(), {}, "32-true").costs
    assert all(layer.sharded_parameters for layer in dense.layers)


class Branching(LanguageModel):
    """Its step decides by a number of the model."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 0 else -loss


class ByHand(LanguageModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "words"),
    [(LanguageModel, ""), (Branching, "the step branches on a value"), (ByHand, "manual optimization")],
)
def test_reason_against_stages(module, words):
    module = module()
    costs = record_costs(pl, module, {}, "32-true").costs
    assert words in costs.why_no_stages and bool(words) == bool(costs.why_no_stages)
    assert costs.num_layers == LAYERS + 2  # its step is recorded all the same


def test_graph_without_nodes_has_no_costs():
    from lightning_hybrid.graph.step_graph import StepGraph

    costs = costs_from_step_graph(StepGraph("training_step", (), ()), {}, samples=1)
    assert costs.flops == 0 and costs.layers == ()


def test_configuration_of_a_gated_decoder():
    costs = costs_from_config(CONFIG, 4096)
    assert costs.parameters == pytest.approx(8.03e9, rel=0.002)
    assert (costs.heads, costs.key_value_heads, costs.positions) == (32, 8, 4096)


def test_configuration_with_other_names_and_experts():
    shape = shape_from_config({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 1024)
    assert (shape.ffn, shape.is_gated, shape.has_learned_positions, shape.has_tied_embedding) == (
        3072,
        False,
        True,
        True,
    )
    shape = shape_from_config({**CONFIG, "num_local_experts": 8, "num_experts_per_tok": 2}, 1024)
    assert (shape.experts, shape.experts_per_token, shape.is_gated) == (8, 2, True)


def test_configuration_of_no_transformer():
    with pytest.raises(ValueError, match="the configuration has none of num_hidden_layers, n_layer"):
        costs_from_config({"channels": 3}, 16)


class GPT2(pl.LightningModule):
    """GPT-2 of transformers, of other sizes."""

    def __init__(self, attention):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.config = transformers.GPT2Config(
            n_layer=3, n_embd=128, n_head=4, n_positions=256, vocab_size=512, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, attn_implementation=attention, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(self.config)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        tokens = torch.zeros(2, self.config.n_positions, dtype=torch.long)
        return DataLoader(TensorDataset(tokens), batch_size=2)


def test_recorded_gpt2_costs_what_its_configuration_does():
    module = GPT2("sdpa")
    positions = module.config.n_positions
    expected = costs_from_config(module.config.to_dict(), positions)
    costs = record_costs(pl, module, {}, "32-true").costs
    assert costs.flops == pytest.approx(expected.flops, rel=0.005)
    assert costs.parameters == pytest.approx(expected.parameters, rel=0.01)
    # Without a fused kernel the scores that the mask hides are computed too.
    hidden = 3 * 4 * positions**2 * 128 / 2
    assert record_costs(pl, GPT2("eager"), {}, "32-true").costs.flops == pytest.approx(
        expected.flops + hidden, rel=0.005
    )


def test_a_configuration_without_an_activation_says_what_is_counted():
    assert costs_from_config(CONFIG, TOKENS).notes == ()
    config = {name: value for name, value in CONFIG.items() if name != "hidden_act"}
    [note] = costs_from_config(config, TOKENS).notes
    assert "without a gate" in note
