"""Feature maps sharded along one dim of space: tensors of the full shape that hold this rank's rows.

    rank 0   image[..., :256, :] ── conv ── norm ── relu ── pool ── ... --.
                             │ halo rows                                    >-- mean over pixels ── head: full
    rank 1   image[..., 256:, :] ── conv ── norm ── relu ── pool ── ... --'

A convolution cuts a full input; what it returns stays sharded as long as operations have a rule. Any other operation
gathers the full tensor, and runs on every rank, so the code that reads feature maps need not be analysed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.logits.sharded import VocabularyTensor
from lightning_hybrid.logits.vocabulary import VocabularyShard
from lightning_hybrid.spatial import losses, norms, resize, windows
from lightning_hybrid.spatial.rows import Rows, can_be_sharded
from lightning_hybrid.step.standins.tensors import materialize
from lightning_hybrid.step.tracing.functions import NotIntercepted
from lightning_hybrid.tensor.collectives import Ranks

_RULES = windows.RULES | resize.RULES | norms.RULES | losses.RULES
_CONVOLUTIONS = frozenset({"conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"})


class SpatialTensor(VocabularyTensor):
    """A feature map, with this rank's rows of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes on to the kernels; a linear map of the last dim is a convolution of one tap."""
        name = getattr(func, "__name__", "")
        if name == "batch_norm" and len(args) == 9 and isinstance(args[0], cls):  # not the one of a library for GPUs
            return torch.native_batch_norm(*args[:8])[0]
        if name == "linear" and args and isinstance(args[0], cls):
            out = _linear(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs one kernel on rows by its rule, or on the full tensor."""
        rule = _RULES.get(func.overloadpacket)
        if rule is not None:
            out = rule(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        return super().__torch_dispatch__(func, types, args, kwargs)


def _linear(input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``F.linear`` of (samples, rows, ..., features)."""
    if not 3 <= input.dim() <= 5 or input.cut_dim in (0, input.dim() - 1) or isinstance(weight, VocabularyShard):
        return NotImplemented
    dims = input.dim() - 2
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    return convolve(input.movedim(-1, 1), weight.view(*weight.shape, *(1 for _ in range(dims))), bias).movedim(1, -1)


class _Cut(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, full: Tensor, dim: int, rows: Rows) -> SpatialTensor:
        """A copy of this rank's rows of a full tensor, which need not be kept for them."""
        return SpatialTensor(rows.local_rows(full.detach(), dim).clone(), dim, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the full shape, on every rank."""
        return materialize(grad), None, None


class Convolution(NamedTuple):
    """The input of a convolution."""

    rows: int  # length of its longest dim of space
    row_bytes: int  # bytes of one row
    border: int  # rows of neighbours that the kernel reads, on both sides together
    weight_bytes: int  # bytes of the kernel


class Convolutions(TorchFunctionMode):
    """Observes convolutions.

    Attributes:
        found: What each has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Convolution] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (x := _input_of(func, args, kwargs)) is not None:
            weight, rows = args[1] if len(args) > 1 else kwargs["weight"], x.shape[_dim_of(x)]
            row_bytes = x.numel() // rows * x.element_size()
            border = weight.shape[_dim_of(x)] - 1
            self.found.append(Convolution(rows, row_bytes, border, weight.numel() * weight.element_size()))
        return func(*args, **kwargs)


class SpatialMode(TorchFunctionMode):
    """The mode of a step: inputs of convolutions are cut along their longest dim of space."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = _input_of(func, args, kwargs)
        if type(x) is not Tensor or not can_be_sharded(x.shape[dim := _dim_of(x)], self._ranks.size):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            cut = _Cut.apply(x, dim, Rows(x.shape[dim], self._ranks))
        if args:
            return func(cut, *args[1:], **kwargs)
        return func(**{**kwargs, "input": cut})


def _input_of(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The batch of images or volumes of a convolution; None for other operations."""
    if getattr(func, "__name__", "") not in _CONVOLUTIONS:
        return None
    x = args[0] if args else kwargs.get("input")
    return x if isinstance(x, Tensor) and x.dim() >= 4 else None


def _dim_of(x: Tensor) -> int:
    """The dim that is cut: the longest one of space, the first of several."""
    return max(range(2, x.dim()), key=lambda dim: (x.shape[dim], -dim))
