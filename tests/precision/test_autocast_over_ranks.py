"""Under autocast tensor and context ranks compute the gradients of one process, but for bfloat16's rounding."""

import pytest
import torch

from harness.fits import Run, check
from models.wide import GPT2Wide


def by_sgd(module):
    """By Adam the second step differs: of gradients near zero it keeps the sign alone, which is rounding's choice."""
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ({"tp": 4}, {"tp": 2, "sequence": True}, {"cp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2})
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(worlds, layout):
    run = Run(GPT2Wide, dtype=torch.float32, change=by_sgd, trainer={"precision": "bf16-mixed"}, **layout)
    ranks, _ = check(worlds, run, tolerance=0.02)
    for rank in ranks:
        for name, gradient in rank.grads[0].items():
            if name.endswith("attn.c_attn.bias"):
                query, key, value = (float(part.abs().max()) for part in gradient.chunk(3))
                assert key < 0.02 * query < 0.02 * value  # of a key's bias it is 0: softmax ignores that
