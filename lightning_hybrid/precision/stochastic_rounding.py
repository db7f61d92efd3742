"""Stochastic rounding of float32 to bfloat16, with random bits that depend on the element and not on the layout.

bfloat16 is the upper half of float32. With 16 random bits added to the lower half before it is cut off, a value is
rounded up with the probability of its distance from the lower neighbour, so the expectation is the value itself:

    float32    sign, exponent, 7 bits | 16 bits + random bits, carry into the upper half
    bfloat16   sign, exponent, 7 bits

The bits of an element are a hash of (seed, step, FQN of the parameter, index in the full tensor). So each rank computes
those of its local shard, and ranks with copies of a shard compute the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.params.boxes import ShardBox, shard_of
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.step.standins.tensors import full_shape

_LOWER_HALF = 0xFFFF
# Elements that are rounded at a time: on the host they stay in the cache of a core, elsewhere this bounds the memory.
_HOST_BLOCK, _DEVICE_BLOCK = 2**17, 2**24


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two neighbours in bfloat16; infinities and NaN stay as they are.

    ``value`` is float32; the lower 16 bits of each element of ``bits``, int32 of the same shape, are uniform.

    Returns:
        A bfloat16 tensor of that shape.
    """
    upper = (bits & _LOWER_HALF).add_(value.view(torch.int32)).bitwise_and_(~_LOWER_HALF)
    return torch.where(value.isfinite(), upper.view(torch.float32), value).to(torch.bfloat16)


def keyed_bits(key: bytes, indices: Tensor) -> Tensor:
    """Hash indices to random bits; the finalizer of MurmurHash3 with two words of a key.

    The key has eight bytes; indices are int32, of any shape.

    Returns:
        An int32 tensor of that shape; its lower 16 bits are random.
    """
    first, second = (int.from_bytes(word, "little", signed=True) for word in (key[:4], key[4:8]))
    x = indices.bitwise_xor(first)
    x = _xor_shifted(x, 16).mul_(-2048144789)  # 0x85EBCA6B
    x = _xor_shifted(x, 13).add_(second).mul_(-1028477387)  # 0xC2B2AE35
    x = _xor_shifted(x, 16).mul_(0x7FEB352D)
    return _xor_shifted(x, 15)


def _xor_shifted(x: Tensor, count: int) -> Tensor:
    """Combine int32 numbers, in place, with themselves shifted to the right, with zeros from the left."""
    return x.bitwise_xor_((x >> count).bitwise_and_((1 << (32 - count)) - 1))


class ParameterNames(dict[int, str]):
    """Names of the parameters of optimizers by id, also of parameters that are added to them later.

    A parameter is named by its FQN, and one outside the module by its place in the optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        self._module, self._optimizers = module, optimizers

    def __missing__(self, key: int) -> str:
        self.clear()
        for number, optimizer in enumerate(self._optimizers):
            members = [p for group in optimizer.param_groups for p in group["params"]]
            self.update((id(p), f"parameter {place} of optimizer {number}") for place, p in enumerate(members))
        self.update((id(p), name) for name, p in self._module.named_parameters())
        return self.get(key, "")


class KeyedRounding:
    """Rounds new values of parameters, or of local shards of them, stochastically."""

    def __init__(
        self,
        names: Mapping[int, str],
        *,
        seed: int = 0,
        step: Callable[[], int],
        shardings: Sequence[AxisSharding] = (),
    ) -> None:
        """Prepare.

        The seed and the number of optimizer steps so far (``step``) are the same on all ranks.
        """
        self._names, self._seed, self._step, self._shardings = names, seed, step, shardings

    def __call__(self, parameter: Tensor, target: Tensor, value: Tensor) -> None:
        """Round a value into a tensor.

        The target is bfloat16, of the full shape or that of this rank's shard; the value float32, of the same shape.
        """
        name, shape = self._names[id(parameter)], full_shape(parameter)
        key = hashlib.blake2b(f"{self._seed} {self._step()} {name}".encode(), digest_size=8).digest()
        spans: tuple[ShardBox, ...] = shard_of([], name, shape).spans
        if tuple(target.shape) != shape:
            shard = shard_of(self._shardings, name, shape)
            assert shard.shape == tuple(target.shape), f"{name} has shape {tuple(target.shape)}, and not {shard.shape}"
            spans = shard.spans
        for span in spans:
            _round_box(key, shape, span, span.of(target), span.of(value))


def _round_box(key: bytes, shape: Sequence[int], span: ShardBox, target: Tensor, value: Tensor) -> None:
    if not shape:
        target.copy_(round_stochastically(value, keyed_bits(key, torch.zeros_like(value, dtype=torch.int32))))
        return
    block = _HOST_BLOCK if value.device.type == "cpu" else _DEVICE_BLOCK
    rows = max(1, block // max(1, prod(span.sizes[1:])))
    for start in range(0, span.sizes[0], rows):
        count = min(rows, span.sizes[0] - start)
        offsets, sizes = (span.offsets[0] + start, *span.offsets[1:]), (count, *span.sizes[1:])
        bits = keyed_bits(key, _indices(shape, offsets, sizes, value.device))
        exact = value.narrow(0, start, count).contiguous()
        target.narrow(0, start, count).copy_(round_stochastically(exact, bits))


def _indices(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """The index of each element of a box in the flat full tensor, its lower 32 bits, int32 of shape ``sizes``."""
    indices = torch.zeros((), dtype=torch.int32, device=device)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        along = torch.arange(offset, offset + size, device=device) * prod(shape[dim + 1 :])
        indices = indices.unsqueeze(-1) + along.to(torch.int32)
    return indices
