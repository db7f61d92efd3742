"""Trials of a sharded unit by shapes alone: one rank on meta tensors, which compute nothing and take no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.deep_copy import copied
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import full_shape
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.shapes_only.counted_ranks import CountedRanks
from lightning_hybrid.tensor.trial.example_inputs import Example
from lightning_hybrid.tensor.trial.run_unit_trials import Outcome, Setting, TrialRanks, run_unsharded
from lightning_hybrid.tensor.trial.sharded_unit_proof import Proof
from lightning_hybrid.tensor.trial.threaded_ranks import TrialFailed

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def on_meta(tensor: Tensor) -> Tensor:
    """A meta tensor of the shape, strides and dtype of a tensor with or without values."""
    with torch._C._DisableTorchDispatch():
        shape, strides = full_shape(tensor), tensor.stride()
        dense = tensor.shape == torch.Size(shape)
        meta = (
            torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
            if dense
            else torch.empty(shape, dtype=tensor.dtype, device="meta")
        )
    return meta.requires_grad_(tensor.requires_grad)


def copy_on_meta(unit: nn.Module) -> nn.Module:
    """A copy of a unit with parameters and buffers on the meta device; its own weights are not read."""
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        memo[id(parameter)] = nn.Parameter(on_meta(parameter).detach(), requires_grad=parameter.requires_grad)
    for buffer in unit.buffers():
        memo[id(buffer)] = on_meta(buffer)
    for module in unit.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                memo.setdefault(id(value), on_meta(value).detach())
    twin: nn.Module = copy.deepcopy(unit, memo)
    return twin


def example_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """The arguments of one call with their own shapes, on the meta device."""
    leaves, spec = flatten((args, kwargs))
    moved = [
        on_meta(leaf)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, _PLAIN)
        else copied(leaf, lambda tensor: on_meta(tensor).detach())
        for leaf in leaves
    ]
    return Example(tuple(moved), spec)


def small_example(unit: nn.Module, example: Example, size: int) -> Example:
    """An example in which sizes that no weight has are small primes, if the unit runs on it; else the example itself.

    Sizes that equal the number of ranks, or a number of features by chance, would be taken for another.

    Args:
        unit: On the meta device.
        example: Of meta tensors.
        size: Number of tensor ranks.
    """
    weights = {length for tensor in (*unit.parameters(), *unit.buffers()) for length in tensor.shape}
    tensors = [leaf for leaf in example.leaves if isinstance(leaf, Tensor)]
    lengths = dict.fromkeys(length for tensor in tensors for length in tensor.shape if length > 1)
    free = [length for length in lengths if length not in weights]
    primes = [prime for prime in _PRIMES if prime % size and size % prime and prime not in weights]
    small = dict(zip(free, primes, strict=False))

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not small.keys() & set(leaf.shape):
            return leaf
        shape = [small.get(length, length) for length in leaf.shape]
        return torch.empty(shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)

    found = Example(tuple(map(resized, example.leaves)), example.spec)
    args, kwargs, _ = found.call()
    try:
        with torch.no_grad(), torch.device("meta"):
            unit(*args, **kwargs)
    except Exception:
        return example
    return found


class _OneRank(TrialRanks):
    """Runs a plan on the first rank alone, and no backward."""

    def __init__(self, unit: nn.Module, size: int) -> None:
        super().__init__(unit, 1)
        self.size = size

    def run(
        self,
        plan: UnitPlan,
        example: Example,
        setting: Setting,
        *,
        learning: bool = False,
        check: Callable[[list[Outcome]], bool] = lambda _: True,
        without: Collection[str] = (),
    ) -> list[Outcome]:
        """Run the forward of the first rank; arguments as for `TrialRanks.run`, none for a backward.

        Raises:
            TrialFailed: It raised.
        """
        del check
        self.num_trials += 1
        self.first_unit = None
        ranks: Any = CountedRanks(0, self.size)
        alone: Any = CountedRanks(0, 1)
        try:
            with torch.device("meta"):  # what user code makes without a device
                return [self._one(ranks, alone, plan, example, setting, learning, without)[0]]
        except Exception as error:
            raise TrialFailed(f"{type(error).__name__}: {error}") from error


class ShapeProof(Proof):
    """Compares the shapes of a sharded forward on the first rank with those of the unsharded unit; no numbers."""

    @classmethod
    def of_unit(cls, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> ShapeProof:
        """Prepare the trials of a unit over `size` tensor ranks; arguments are those of one call."""
        twin = copy_on_meta(unit)
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.get_default_dtype())
        example = small_example(twin, example_on_meta(args, kwargs), size)
        return cls(twin, example, _OneRank(twin, size), dtype)

    def difference(
        self,
        plan: UnitPlan,
        setting: Setting,
        *,
        learning: bool = False,
        forward_only: bool = False,
        without: Collection[str] = (),
    ) -> str | None:
        """The first difference of shapes; arguments as for `Proof.difference`."""
        del forward_only
        found = self.outcomes(plan, setting, learning=learning, without=without)
        return found if isinstance(found, str) else None

    def reference(self, setting: Setting, without: Collection[str] = ()) -> Outcome:
        """The outcome of the unsharded forward."""
        cached = self._references.get("")
        if cached is None:
            with torch.device("meta"):
                outcome = run_unsharded(self.unit, self.example, setting, without, backward=False)
            cached = self._references[""] = outcome, frozenset()
        return cached[0]

    def run_unit(self) -> None:
        """Run the unsharded unit once on its example."""
        with torch.device("meta"):
            super().run_unit()

    def runs_as_first(self, setting: Setting) -> bool:
        """Whether a setting needs no trial: the first one stands for all."""
        return setting is not self.first

    def _outputs_differ(self, outcomes: list[Outcome], expected: Outcome, setting: Setting) -> str | None:
        del setting
        for outcome in outcomes:
            self.sharded_outputs |= self._sharded_outputs(outcome, expected)
            for index, (found, wanted) in enumerate(zip(outcome.outputs, expected.outputs, strict=True)):
                if isinstance(wanted, Tensor) and found.shape != wanted.shape:
                    return f"output {index} has shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        return None
