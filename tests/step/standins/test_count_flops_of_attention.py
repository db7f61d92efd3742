"""FLOPs of attention in a recorded step: those of its kernel, on CPUs too; a pipeline is cut by them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from harness.one_process_pipeline import record_and_cut
from lightning_hybrid.step.standins.counts import CostCounter

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 16, 8
BOTH_PRODUCTS = 2 * (2 * BATCH * HEADS * TOKENS * TOKENS * WIDTH)
CAUSAL = BOTH_PRODUCTS * (TOKENS + 1) / (2 * TOKENS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, BOTH_PRODUCTS),
        ({"is_causal": True}, CAUSAL),
        ({"attn_mask": "lower triangle"}, BOTH_PRODUCTS),
        ({"is_causal": True, "enable_gqa": True}, CAUSAL),
        ({"is_causal": True, "dropout_p": 0.5}, BOTH_PRODUCTS),  # products of matrices, with a mask
    ],
    ids=str,
)
def test_attention_on_cpu(arguments, expected):
    with FakeTensorMode():
        if "attn_mask" in arguments:
            arguments = {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()}
        queries = torch.randn(BATCH, HEADS, TOKENS, WIDTH)
        keys = torch.randn(BATCH, HEADS // 2 if "enable_gqa" in arguments else HEADS, TOKENS, WIDTH)
        counter = CostCounter(nn.Linear(1, 1))
        with counter:
            F.scaled_dot_product_attention(queries, keys, keys, **arguments)
    assert counter.flops == expected
    assert counter.step_flops == BOTH_PRODUCTS  # of the monitors: by torch's formula, here without a backward


@pytest.mark.parametrize(("queries", "keys"), [(4, 12), (12, 4), (1, 1)])
def test_causal_attention_of_other_lengths(queries, keys):
    with FakeTensorMode():
        counter = CostCounter(nn.Linear(1, 1))
        with counter:
            others = torch.randn(1, 1, keys, WIDTH)
            F.scaled_dot_product_attention(torch.randn(1, 1, queries, WIDTH), others, others, is_causal=True)
    seen = int(torch.ones(queries, keys).tril().sum())
    assert counter.flops == pytest.approx(2 * 2 * seen * WIDTH)


class Attention(nn.Module):
    """Much attention, few parameters."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.projection(x)[:, None]
        return x + F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)


class Unequal(nn.Module):
    """Two layers with attention before six without it."""

    def __init__(self):
        super().__init__()
        layers = [Attention(), Attention(), *(nn.Linear(WIDTH, WIDTH) for _ in range(6))]
        self.layers = nn.ModuleList(layers)

    def loss(self, batch):
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()


def test_a_pipeline_is_cut_by_the_flops_of_attention():
    module = Unequal()
    batch = torch.randn(2, 2048, WIDTH)
    stages = record_and_cut(module, lambda: module.loss(batch), 2).assignment.holders
    assert stages["layers.0.projection.weight"] == (0,)
    assert {stages[f"layers.{index}.weight"] for index in range(2, 8)} == {(1,)}
    assert stages["layers.1.projection.weight"] == (1,), "one layer with attention on each stage"
