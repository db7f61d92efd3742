"""Steps that inspect the signature of a layer's forward, as transformers does before it generates."""

import inspect

import torch
from torch import nn
from torch.nn import functional as F

from harness.layouts import under
from harness.verification import LAYOUTS, TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor

PP2, *_ = LAYOUTS
REST = [
    Layout("zero 3", devices=2, strategy={"data_parallel_size": 2, "zero_stage": 3}),
    Layout("pp2, recomputed", devices=2, strategy={"pipeline_parallel_size": 2, "recompute": "full"}),
    Layout("pp2, compiled", devices=2, strategy={"pipeline_parallel_size": 2, "compile": {"backend": "eager"}}),
]


def takes(module, name):
    return name in inspect.signature(module.forward).parameters


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, hidden, scale=1.0):
        torch.rand(1)  # drawing modules have a further wrapper
        inner = F.gelu(self.one(hidden))
        return hidden + self.other(inner) * (scale if takes(self.one, "input") else 10.0)


class InspectsSignature(Regressor):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(FEATURES, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, **({"scale": 0.5} if takes(layer, "scale") else {}))
        return self.head(x)

    def validation_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("val_loss", loss)
        if loss > 1e-6:  # runs unsplit
            self.log("takes_input", torch.tensor(float(takes(self.head, "input"))))


@under([PP2, TENSOR, *REST], also=REST)
def test_layer_keeps_the_signature_of_forward(worlds, layout):
    report = check(worlds, InspectsSignature, layout)
    assert report.outcome == "same", str(report)
