"""FLOPs of recurrent layers, whose kernels torch has no formula for, against the same layers by matrix products."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_hybrid.step.standins.counts import CostCounter, flops_of_kernel

TIME, BATCH, FEATURES, WIDTH = 128, 3, 16, 32


class LSTMByProducts(nn.Module):
    """An LSTM of one layer, one position after the other."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state = nn.Linear(FEATURES, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x):
        state = cell = x.new_zeros(x.shape[1], WIDTH)
        outputs = []
        for gates in self.of_input(x).unbind(0):
            i, f, g, o = (gates + self.of_state(state)).chunk(4, dim=-1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            outputs.append(state)
        return torch.stack(outputs)


def counted(module, requires_grad=False):
    with FakeTensorMode():
        layer, counter = module(), CostCounter(nn.Linear(1, 1))
        x = torch.randn(TIME, BATCH, FEATURES, requires_grad=requires_grad)
        with counter:
            layer(x)
    return counter.flops, counter.step_flops


@pytest.mark.parametrize("requires_grad", [False, True])
def test_lstm_is_counted_as_its_products(requires_grad):
    expected = counted(LSTMByProducts, requires_grad)
    assert expected[0] == 2 * TIME * BATCH * 4 * WIDTH * (FEATURES + WIDTH)
    assert counted(lambda: nn.LSTM(FEATURES, WIDTH), requires_grad) == pytest.approx(expected, rel=0.02)


def test_layers_and_directions():
    one = counted(lambda: nn.LSTM(FEATURES, WIDTH))[0]
    inner = 2 * TIME * BATCH * 4 * WIDTH * (2 * WIDTH + WIDTH)
    layers = counted(lambda: nn.LSTM(FEATURES, WIDTH, num_layers=2, bidirectional=True))[0]
    assert layers == pytest.approx(2 * (one + inner))


def test_without_gradients():
    with torch.no_grad():
        forward, step = counted(lambda: nn.LSTM(FEATURES, WIDTH))
    assert forward == step > 0


def test_kernel_of_gpus_has_the_same_count():
    layer, x = nn.LSTM(FEATURES, WIDTH), torch.randn(TIME, BATCH, FEATURES)
    found = flops_of_kernel(torch.ops.aten._cudnn_rnn.default, (x, list(layer.parameters()), 4), {}, None)
    forward, step = counted(lambda: nn.LSTM(FEATURES, WIDTH))
    assert found == (forward, step - forward)
