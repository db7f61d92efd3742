"""Cuts of real modules: balanced, where the user puts them, or refused with names."""

import pytest
from torch import nn
from torch.nn import functional as F

from harness.one_process_pipeline import assert_same_gradients, pipeline, reference
from lightning_hybrid.errors import PartitionError
from models.cases import batch_of, make
from models.hand_written import WIDTH, Layers, mlp


def run(module, num_stages, cuts=None):
    batch = batch_of(module.kind, range(4))
    return pipeline(module, lambda: module.loss(batch), num_stages, cuts=cuts)


def test_equal_layers_are_cut_evenly():
    module = make("Layers")
    assert run(module, 2).units == [["layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]


@pytest.mark.parametrize("case", ["Layers", "GPT2", "Llama", "Bert", "ViT", "T5"])
def test_no_stage_costs_much_more_than_the_mean(case):
    costs = run(make(case), 2).assignment.costs()
    assert max(costs) <= 1.35 * sum(costs) / 2, costs


def test_large_unit_is_opened():
    class Nested(Layers):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([mlp(), nn.Sequential(mlp(), mlp(), mlp(), mlp(), mlp())])

    module = make(Nested)
    assert run(module, 2).units == [
        ["layers.0", "layers.1.0", "layers.1.1"],
        ["layers.1.2", "layers.1.3", "layers.1.4", "head"],
    ]


@pytest.mark.parametrize(
    ("cuts", "first"),
    [
        (["layers.1"], ["layers.0"]),
        (["head"], [f"layers.{i}" for i in range(4)]),
        (["layers.3"], ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_user_cuts(cuts, first):
    module = make("Layers")
    batch = batch_of(module.kind, range(4))
    got = run(module, 2, cuts)
    assert got.units[0] == first
    assert_same_gradients(got.grads, reference(module, lambda: module.loss(batch)).grads)


def test_cut_inside_a_unit_opens_it():
    module = make("Layers")
    got = run(module, 2, ["layers.2.2"])
    assert "layers.2.0" in got.units[0] and "layers.2.2" in got.units[1]


def test_cuts_inside_hugging_face_models():
    got = run(make("GPT2"), 3, ["model.transformer.h.1", "model.transformer.h.3"])
    assert [units[0] for units in got.units[1:]] == ["model.transformer.h.1", "model.transformer.h.3"]


def test_unknown_cut_lists_the_nearest_names():
    with pytest.raises(PartitionError, match=r"'layer\.2', which training_step never uses; did you mean 'layers\.2"):
        run(make("Layers"), 2, ["layer.2"])


def test_cuts_out_of_step_order():
    with pytest.raises(PartitionError, match=r"the order of training_step, which uses layers\.1 before layers\.3; "):
        run(make("Layers"), 3, ["layers.3", "layers.1"])


def test_more_stages_than_units():
    class Two(Layers):
        def __init__(self):
            super().__init__(num_layers=0)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    with pytest.raises(PartitionError, match="makes 4 stages, but the step has only 2 layers with parameters"):
        run(make(Two), 4)


def test_recurrent_model_is_refused():
    class Loops(Layers):
        def loss(self, batch):
            x = batch["x"]
            for _ in range(3):
                for layer in self.layers:
                    x = x + layer(x)
            return F.cross_entropy(self.head(x), batch["label"])

    with pytest.raises(
        PartitionError, match=r"recurrent through its stages: \d+ of \d+ .*set pipeline_parallel_size=1"
    ):
        run(make(Loops), 2)
