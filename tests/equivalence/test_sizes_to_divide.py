"""Which sizes of a wide layer are divided, and which are no widths."""

import pytest
import torch

from lightning_hybrid.equivalence.division import Division, divisions, have_same_shards
from models.wide_layers import GatedLayer

WIDTH = 128


def test_heads_and_vocabularies_are_not_divided():
    unit = GatedLayer(WIDTH, 3 * WIDTH, num_heads=4, num_kv_heads=2)
    found = list(divisions(unit, [torch.randn(2, 10, WIDTH)], 2, {3 * WIDTH}))
    assert found
    assert all(3 * WIDTH not in division.sizes and 4 not in division.sizes for division in found)
    division = Division(4, frozenset({64}))
    assert division.attribute("num_heads", 64) == 64
    assert division.attribute("head_dim", 64) == division.attribute("width", 64) == 16
    assert division.attribute("normalized_shape", (64,)) == (16,)


@pytest.mark.parametrize(
    ("width", "quotient", "expected"), [(128, 32, True), (128, 16, True), (128, 8, False), (8, 4, False), (4, 2, False)]
)
def test_sizes_with_the_same_shards(width, quotient, expected):
    """Eight ranks share 8 heads, not 4, and hold 4 heads twice and 2 heads four times."""
    assert have_same_shards(width, quotient, 8) is expected
