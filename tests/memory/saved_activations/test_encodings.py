"""Encodings of saved tensors: exact where they claim it, unbiased and bounded where they round."""

import pytest
import torch

from lightning_hybrid.memory.saved_activations.encoding import (
    GROUP,
    dequantize,
    pack_codes,
    pack_integers,
    pack_two_values,
    quantize,
    unpack_codes,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 7, 8, 1000])
def test_codes_survive_packing(bits, length):
    codes = torch.randint(0, 2**bits, (length,), generator=generator(), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert len(packed) == -(-length * bits // 8) and torch.equal(unpack_codes(packed, bits, length), codes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_error_is_below_the_distance_of_two_levels(bits, dtype):
    flat = torch.randn(5 * GROUP + 3, generator=generator(), dtype=torch.float64).to(dtype)
    codes, scales = quantize(flat, bits, generator(1))
    assert len(codes) * 8 <= (len(flat) + GROUP) * bits
    again = dequantize(codes, scales, bits, len(flat), torch.float32)
    steps = scales.view(-1, 2)[:, 1].repeat_interleave(GROUP)[: len(flat)]
    assert bool(((again - flat.float()).abs() <= steps * 1.001).all())
    assert float((again - flat.float()).abs().max()) > 0


def test_rounding_is_unbiased():
    flat = torch.rand(4 * GROUP, generator=generator()) * 3 - 1
    mean = sum(dequantize(*quantize(flat, 2, generator(k)), 2, len(flat), flat.dtype) for k in range(400)) / 400
    # The step is 1; the deviation of a mean of 400 is at most 0.5 / 20.
    assert float((mean - flat).abs().max()) < 0.025 * 4.5
    assert abs(float((mean - flat).mean())) < 0.025 * 4 / len(flat) ** 0.5


def test_equal_keys_round_equally():
    flat = torch.randn(1000, generator=generator())
    one, same, other = (quantize(flat, 4, generator(seed))[0] for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_constant_groups_and_values_that_are_not_finite():
    constant = torch.full((300,), 1.7)
    assert torch.equal(dequantize(*quantize(constant, 8, generator()), 8, 300, torch.float32), constant)
    flat = torch.randn(2 * GROUP, generator=generator())
    flat[3] = torch.inf
    again = dequantize(*quantize(flat, 8, generator()), 8, len(flat), torch.float32)
    assert bool(again[:GROUP].isnan().any()) and bool(again[GROUP:].isfinite().all())


@pytest.mark.parametrize(
    "flat",
    [
        torch.rand(1001, generator=generator()) < 0.3,
        (torch.rand(1001, generator=generator()) < 0.3) / 0.7,
        torch.where(torch.rand(1001, generator=generator()) < 0.3, 0.0, -torch.inf),
        torch.zeros(5, dtype=torch.bfloat16),
    ],
    ids=["bool", "scaled", "attention", "constant"],
)
def test_two_values_are_exact(flat):
    packed = pack_two_values(flat)
    assert packed is not None and packed.parts[0].nbytes <= flat.nbytes / 7.9 + 1
    again = packed.decode(*packed.parts)
    assert again.dtype == flat.dtype and torch.equal(again, flat)


def test_three_values_are_not_two():
    flat = (torch.rand(1001, generator=generator()) < 0.3).float()
    flat[700] = 0.5
    assert pack_two_values(flat) is None
    assert pack_two_values(torch.tensor([0.0, torch.nan])) is None
    assert pack_two_values(torch.tensor([0.0, -0.0, 1.0])) is None
    assert pack_two_values(torch.randn(10)) is None


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(-5, 250, torch.uint8), (1000, 33000, torch.int16), (-(2**31), -5, torch.int32), (0, 2**40, None)],
)
def test_integers_are_exact(low, high, dtype):
    flat = torch.randint(low, high + 1, (500,), generator=generator())
    flat[:2] = torch.tensor([low, high])
    packed = pack_integers(flat)
    if dtype is None:
        assert packed is None
        return
    assert packed is not None and packed.parts[0].dtype == dtype
    again = packed.decode(*packed.parts)
    assert again.dtype == flat.dtype and torch.equal(again, flat)
