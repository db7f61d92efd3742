"""Evaluation of torch's transformers over stages, and values of another dtype than recorded."""

import contextlib

import pytest
import torch
from torch import nn

from harness.one_process_pipeline import OneRank, keyed
from lightning_hybrid.errors import StepChanged
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.pipeline.stages.recording import record_variant
from lightning_hybrid.step.replay.stage import instrumented
from models.cases import batch_of, make
from models.hand_written import WIDTH, Layers


def evaluate(module, step, num_stages, context=contextlib.nullcontext):
    """The result of a validation step, computed stage by stage."""
    randomness = keyed()
    plan = StagePlan(module, OneRank(), randomness, stages_per_rank=num_stages)
    names = {id(p): name for name, p in module.named_parameters()}
    values = {}
    with torch.no_grad():
        variant = record_variant(plan, plan.recipe("validation_step", step, context=context))
        portals = variant.assignment.portals
        for stage, replay in variant.replays.items():
            received = {v: values[v] for (_, target), sent in portals.items() if target == stage for v in sent}
            with instrumented([replay], randomness) as current, context():
                values.update(replay.run(step, received, names, current).made)
    (returned,) = variant.assignment.graph.returned
    assert variant.assignment.num_stages == num_stages and portals
    return values[returned]


class Encoder(Layers):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)

    def forward(self, x):
        return self.layers(x, src_key_padding_mask=x[..., 0] == 0)


def encoder(dtype):
    module = make(Encoder, dtype).eval()
    x = torch.randn(4, 5, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x[::2, 3:] = 0
    return module, x


@contextlib.contextmanager
def without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_encoder_with_padding_mask():
    module, x = encoder(torch.float64)
    got = evaluate(module, lambda: module(x), 2)
    assert torch.backends.mha.get_fastpath_enabled()
    with without_fast_path(), torch.no_grad():
        assert torch.equal(got, module(x))
    with torch.no_grad(), pytest.warns(UserWarning, match="nested tensors"):
        fast = module(x)
    real = x[..., 0] != 0
    torch.testing.assert_close(got[real], fast[real], rtol=1e-10, atol=1e-12)


def test_encoder_under_autocast():
    """The fast path would return bfloat16 where the slow one returns float32."""
    module, x = encoder(torch.float32)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    got = evaluate(module, lambda: module(x), 2, autocast)
    with without_fast_path(), torch.no_grad(), autocast():
        assert torch.equal(got, module(x))


class Casting(nn.Linear):
    """Its result has a dtype that no code reads."""

    dtypes = (torch.float64,)

    def forward(self, x):
        return super().forward(x.double()).to(Casting.dtypes[0])


class Casts(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Casting(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.double().sum()


def test_value_of_another_dtype_is_not_sent(monkeypatch):
    module = make(Casts).eval()
    x = batch_of("vectors", range(4))["x"]
    runs = []

    def step():
        runs.append(1)
        if len(runs) == 2:
            monkeypatch.setattr(Casting, "dtypes", (torch.float32,))
        return module(x)

    with pytest.raises(StepChanged, match=r"torch\.float64 when .* now has torch\.float32"):
        evaluate(module, step, 2)
