"""A tensor size that divides no layer is told once, with the nearest sizes, and the start table is printed once."""

import warnings

import pytest
import torch

from harness.trainer_runs import trainer_of
from lightning_hybrid.tensor.plan import nearest_divisors
from models.tiny import Tiny, loader


def printed_of_fit(pp, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(torch.distributed.get_world_size(), pp, strategy_options=options, max_steps=2).fit(Tiny(), loader(6))
    return [str(each.message) for each in caught if "sharded instead" in str(each.message)]


def test_uneven_size_is_warned_of_once(worlds):
    said, *_ = worlds.run(5, printed_of_fit, 1, {"tensor_parallel_size": 5})
    [text] = said
    assert "tensor_parallel_size=5 shards no layer of the module" in text and "set it to " in text, text


@pytest.mark.parametrize(("number", "size", "nearest"), [(12, 5, "4 or 6"), (4, 3, "2 or 4"), (2, 3, "2"), (1, 2, "")])
def test_nearest_divisors(number, size, nearest):
    assert nearest_divisors(number, size) == nearest
