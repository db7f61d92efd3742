import pytest
import torch

from lightning_hybrid.equivalence.difference import are_equal_within, difference_of

TOLERANCE = 1e-9


@pytest.mark.parametrize("place", [(0, 0), (517, 11)])
@pytest.mark.parametrize("wrong", [1e-6, float("nan")])
def test_one_wrong_element_of_a_large_gradient(place, wrong):
    wanted = torch.randn(768, 300, dtype=torch.float64)
    found = wanted.t().contiguous().t()
    assert difference_of(found, wanted, TOLERANCE) is None
    found[place] += wrong
    assert "relative difference" in difference_of(found, wanted, TOLERANCE)
    assert not are_equal_within(found, wanted, TOLERANCE, full=wanted)
