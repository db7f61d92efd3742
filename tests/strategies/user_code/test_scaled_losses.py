"""Code of the user that scales the loss or its gradient right before the backward of a step in stages or shards."""

import pytest

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import Tiny, loader


class InPlace(Tiny):
    def on_before_backward(self, loss):
        loss.mul_(3.0)


class ByHook(Tiny):
    def on_before_backward(self, loss):
        loss.register_hook(lambda gradient: 3.0 * gradient)


class InBackward(Tiny):
    def backward(self, loss):
        (3.0 * loss).backward()


def run_fit(size, case, layout, accumulated):
    ignore_warnings()
    model = case()
    trainer_of(size, strategy_options=layout, accumulate_grad_batches=accumulated).fit(model, loader(4))
    return weights_of(model)


PP, TP = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("case", "layout", "accumulated"),
    [(Tiny, PP, 2), *((case, layout, 1) for case in (InPlace, ByHook, InBackward) for layout in (PP, TP))],
)
def test_a_scaled_loss_scales_the_gradients(worlds, case, layout, accumulated):
    [expected] = worlds.run(1, run_fit, 1, case, {}, accumulated)
    for found in worlds.run(2, run_fit, 2, case, layout, accumulated):
        assert_same(found, expected)
