"""Recognizes dense MLPs of any class: plain ones of two linears, and gated ones of three.

Neither names nor source code are inspected. The weight matrices of a module are found by running each linear by
itself; candidate structures are tried, and one is accepted if it matches the module on a copy with random float64
weights. (With the real weights, a projection initialized to zeros would match anything.)
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.moe.grouped import ACTIVATIONS, GroupedExperts

_BATCH, _LENGTH = 2, 3
_TOLERANCE = 1e-9


class NotAnMLP(ValueError):
    """The module cannot be an expert."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Location of one weight matrix of a dense MLP."""

    weight: str  # name of the parameter
    bias: str  # name of its bias; "" if it has none
    transposed: bool  # whether the weight is laid out [inputs, outputs]
    rows: tuple[int, int | None] = (0, None)  # start and stop of the parameter's output rows that belong to it

    def weight_of(self, module: nn.Module) -> Tensor:
        """Returns the weight of a module, of shape [outputs, inputs]."""
        weight: Tensor = module.get_parameter(self.weight)
        return (weight.t() if self.transposed else weight)[slice(*self.rows)]

    def bias_of(self, module: nn.Module) -> Tensor:
        """Returns the bias of a module, of shape [outputs]."""
        return module.get_parameter(self.bias)[slice(*self.rows)]


@dataclasses.dataclass(frozen=True)
class DenseMLP:
    """Recognized structure of a dense MLP."""

    dim: int  # size of its inputs and outputs
    takes_rows: bool  # whether it takes inputs [rows, dim] or needs [1, rows, dim]
    matrices: tuple[Matrix, ...] = ()  # the gate if there is one, up, and down; none if its structure is not recognized
    activation: str = ""  # name of the activation between them
    dropout: float = 0.0  # share of its outputs that are dropped in training


@torch.no_grad()
def recognise(module: nn.Module) -> DenseMLP:
    """Recognizes the structure of a dense MLP, which is not changed.

    Raises:
        NotAnMLP: It is no function of one tensor that keeps its shape and applies to each position separately; the
            message is a continuation of "it ".
    """
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    probe = copy.deepcopy(module).to("cpu", torch.float64).eval()
    for name, parameter in probe.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        drawn = torch.randn(parameter.shape, generator=generators[0], dtype=torch.float64)
        probe.get_parameter(name).copy_(drawn * scale)
    dim, takes_rows = _find_dim(probe, generators[1])
    matrices = sum(parameter.dim() > 1 for parameter in module.parameters())
    if matrices < 2:
        raise NotAnMLP(f"has {'one weight matrix' if matrices else 'no weight matrix'}, and an MLP has two or more")
    unknown = DenseMLP(dim, takes_rows)
    if len({parameter.requires_grad for parameter in probe.parameters()}) > 1 or any(True for _ in probe.buffers()):
        return unknown
    x = torch.randn(_BATCH, _LENGTH, dim, generator=generators[1], dtype=torch.float64)
    expected = probe(x)
    dropout = _output_dropout(probe, x, expected)
    if dropout is None:
        return unknown
    for candidate in _candidates(probe, unknown):
        if _matches(candidate, probe, x, expected):
            return dataclasses.replace(candidate, dropout=dropout)
    return unknown


@torch.no_grad()
def experts_of(dense: DenseMLP, modules: Sequence[nn.Module]) -> GroupedExperts:
    """Stacks the weights of dense MLPs of one structure into grouped experts, with the first one's dtype and device."""
    *first, down = dense.matrices
    width, like = down.weight_of(modules[0]).shape[1], modules[0].get_parameter(down.weight)
    options: dict[str, Any] = {"gated": len(first) == 2, "activation": dense.activation, "bias": bool(down.bias)}
    experts = GroupedExperts(len(modules), dense.dim, width, **options).to(like.device, like.dtype)
    for name, matrices in (("up", first), ("down", [down])):
        weights = [torch.cat([matrix.weight_of(module) for matrix in matrices]) for module in modules]
        stacked = {name: torch.stack(weights)}
        if down.bias:
            biases = [torch.cat([matrix.bias_of(module) for matrix in matrices]) for module in modules]
            stacked[f"{name}_bias"] = torch.stack(biases)
        for each, value in stacked.items():
            experts.get_parameter(each).copy_(value).requires_grad_(like.requires_grad)
    return experts


def _find_dim(probe: nn.Module, generator: torch.Generator) -> tuple[int, bool]:
    """Returns the size of inputs and outputs, and whether inputs [rows, dim] are accepted."""
    sizes = sorted({size for parameter in probe.parameters() for size in parameter.shape})
    if not sizes:
        raise NotAnMLP("has no parameters")
    reason = ""
    for dim in sizes:
        x = torch.randn(_BATCH, _LENGTH, dim, generator=generator, dtype=torch.float64)
        try:
            y = probe(x)
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}".split("\n")[0]
            continue
        if not isinstance(y, Tensor):
            raise NotAnMLP(f"returns {type(y).__name__} and not one tensor")
        if y.shape != x.shape:
            reason = f"returns shape {list(y.shape)} for {list(x.shape)}"
            continue
        rows, expected = x.flatten(0, 1).flip(0), y.flatten(0, 1).flip(0)
        for takes_rows in (True, False):
            try:
                output = probe(rows) if takes_rows else probe(rows[None])[0]
            except Exception:
                continue
            if output.shape == expected.shape and _allclose(output, expected):
                return dim, takes_rows
        raise NotAnMLP("does not process every position independently")
    raise NotAnMLP(f"takes no tensor [batch, length, dim] for any dim among {sizes} ({reason})")


def _output_dropout(probe: nn.Module, x: Tensor, expected: Tensor) -> float | None:
    """Returns the dropout probability of the outputs; None if something else is dropped or drawn."""
    dropouts = [m for m in probe.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    shares = [dropout.p for dropout in dropouts]
    for dropout in dropouts:
        handle = dropout.register_forward_hook(lambda module, args, out: 2 * out)
        is_at_the_end = _allclose(probe(x), 2 * expected)
        handle.remove()
        if not is_at_the_end:
            return None
        dropout.p = 0.0
    # Other effects of training mode (a functional dropout, noise) are not recognized.
    with torch.random.fork_rng(devices=[]):
        unchanged = _allclose(probe.train()(x), expected)
    probe.eval()
    return sum(shares) if unchanged and len(shares) < 2 else None


def _matrices(probe: nn.Module) -> Iterator[tuple[Matrix, int, int]]:
    """Yields every linear inside, with its numbers of inputs and outputs."""
    for name, module in probe.named_modules():
        local = dict(module.named_parameters(recurse=False))
        if set(local) not in ({"weight"}, {"weight", "bias"}) or local["weight"].dim() != 2 or any(module.children()):
            continue
        prefix = f"{name}." if name else ""
        for transposed in (False, True):
            weight = local["weight"].t() if transposed else local["weight"]
            x = torch.linspace(-1, 1, _LENGTH * weight.shape[1], dtype=torch.float64).view(_LENGTH, -1)
            try:
                y = module(x)
            except Exception:
                continue
            bias = local.get("bias")
            expected = nn.functional.linear(x, weight, bias if bias is None or len(bias) == len(weight) else None)
            if isinstance(y, Tensor) and y.shape == expected.shape and _allclose(y, expected):
                biased = f"{prefix}bias" if "bias" in local else ""
                yield Matrix(f"{prefix}weight", biased, transposed), weight.shape[1], weight.shape[0]
                break


def _candidates(probe: nn.Module, unknown: DenseMLP) -> Iterator[DenseMLP]:
    """Yields the structures that the sizes of the module's matrices allow."""
    matrices = list(_matrices(probe))
    named = {name for matrix, _, _ in matrices for name in (matrix.weight, matrix.bias)}
    if not {name for name, _ in probe.named_parameters(remove_duplicate=False)} <= named:
        return
    dim = unknown.dim
    for order in itertools.permutations(matrices) if len(matrices) in (2, 3) else ():
        (down, width, outputs), *into = order
        if outputs != dim or any(inputs != dim for _, inputs, _ in into):
            continue
        sizes, first = [size for _, _, size in into], tuple(matrix for matrix, _, _ in into)
        halves = tuple(dataclasses.replace(first[0], rows=(row, row + width)) for row in (0, width))
        structures = [first[::-1]] if sizes in ([width], [width, width]) else []
        structures += [halves, halves[::-1]] if sizes == [2 * width] else []
        for structure in structures:
            for activation in ACTIVATIONS:
                yield dataclasses.replace(unknown, matrices=(*structure, down), activation=activation)


def _matches(dense: DenseMLP, probe: nn.Module, x: Tensor, expected: Tensor) -> bool:
    if len({bool(matrix.bias) for matrix in dense.matrices}) > 1:
        return False  # only some of them have a bias
    rows = x.flatten(0, 1)
    output = experts_of(dense, [probe])(rows, torch.tensor([len(rows)]))
    return _allclose(output, expected.flatten(0, 1))


def _allclose(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE))
