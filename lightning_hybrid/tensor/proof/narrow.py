"""A narrow copy of a wide layer, on which its plan is searched and proved in place of the layer.

Trials of a layer at its own width cost several copies of its weights and most of their time. A narrow copy has its
widths divided by one factor, and the same numbers of heads, experts and ranks. It takes the place of the layer only
where both run the same program:

    before the search   unsharded, the layer and the copy make the same torch calls from the same lines, with the same
                        numbers and shapes but for divided widths
    after it            so do both sharded by the plan that was found, each at its own width

The layer itself runs on fake tensors there: no weights are allocated and nothing is computed. A copy that differs is
not used, and the layer is proved at its own width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from lightning_hybrid.equivalence.division import Division, copy_of_unit, divided_leaf, divisions, named_widths
from lightning_hybrid.equivalence.shapes import ShapeTrace, difference_but_width, why_not_same_program
from lightning_hybrid.params.placement import Placement, Shard, scaled
from lightning_hybrid.step.objects.pytree import unflatten
from lightning_hybrid.step.standins.kernels import quiet_fake_kernels
from lightning_hybrid.step.standins.tensors import FAKE_MODE
from lightning_hybrid.tensor.collectives import CountedRanks
from lightning_hybrid.tensor.plan import LinearLike, PositionsPlan, UnitPlan
from lightning_hybrid.tensor.proof.example import Example, make_example
from lightning_hybrid.tensor.proof.proof import prove_cached
from lightning_hybrid.tensor.proof.trials import Setting, run_forward
from lightning_hybrid.tensor.runtime.unit import shards_of, unit_on_trial

LEAST_NUMEL = 2**24  # parameters of a layer that is worth a copy; smaller ones are searched in a second or two
_MODES = (True, False)  # training, evaluation


@dataclass(frozen=True)
class NarrowLayer:
    """A narrow copy of a unit that runs the same program."""

    unit: nn.Module  # the copy, for proofs: parameters without values, buffers with
    args: tuple[Any, ...]  # arguments of one call of it
    kwargs: dict[str, Any]  # its keyword arguments
    factor: int  # what its widths are divided by
    _full: tuple[nn.Module, Example]  # of fake tensors
    _narrow: tuple[nn.Module, Example]

    def plan_of_full(self, plan: UnitPlan) -> UnitPlan | str:
        """The plan of the full unit for a proved plan of the copy, or what differs where both run by their plans."""
        try:
            wide = plan_of_other_width(plan, self._narrow[0], self._full[0])
        except ValueError as error:
            return str(error)
        return self._difference(wide, plan) or wide

    def prove_cached(self, plan: UnitPlan) -> UnitPlan | None:
        """Proves a plan of the full unit on the copy, as `prove_cached`."""
        try:
            narrow = plan_of_other_width(plan, self._full[0], self._narrow[0])
        except ValueError:
            return None
        proved = prove_cached(self.unit, self.args, self.kwargs, narrow)
        if proved is None or self._difference(plan, narrow):
            return None
        return replace(plan, calls=proved.calls, num_trials=proved.num_trials, seconds=proved.seconds)

    def _difference(self, wide: UnitPlan, narrow: UnitPlan) -> str:
        """What differs between the full unit and the copy beside widths where each runs by its plan; or ""."""
        for of_full, of_narrow in zip(_plans_in(wide), _plans_in(narrow), strict=True):
            for training in _MODES:
                for last in (False, True):
                    try:
                        full, small = (
                            sharded_trace(unit, replace(plan, calls=frozenset()), example, training=training, last=last)
                            for (unit, example), plan in ((self._full, of_full), (self._narrow, of_narrow))
                        )
                    except Exception as error:
                        return f"{type(error).__name__}: {error}"
                    if difference := difference_but_width(full, small, self.factor):
                        return difference
        return ""


def _plans_in(plan: UnitPlan) -> Iterator[UnitPlan]:
    """A plan, and those for calls whose sequence is not sharded."""
    if plan.is_sharded:
        yield plan
    if plan.full_sequence_plan is not None:
        yield from _plans_in(plan.full_sequence_plan)
    elif plan.by == "tensor":
        yield replace(plan, positions=None)


def narrow_layer(
    unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, kept: Collection[int] = ()
) -> NarrowLayer | str:
    """A narrow copy of a unit, or why there is none; "" if the unit is small.

    ``size`` is the number of tensor ranks times context ranks; ``kept`` are sizes that are not divided (vocabularies).
    """
    if size == 1 or sum(prod(parameter.shape) for parameter in unit.parameters()) < LEAST_NUMEL:
        return ""
    try:
        with torch.random.fork_rng(devices=[]):
            return _narrow_layer(unit, args, kwargs, size, kept)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _narrow_layer(
    unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, kept: Collection[int]
) -> NarrowLayer | str:
    full = copy_of_unit(unit)
    errors: list[str] = []

    def runs(example: Example) -> bool:
        try:
            unsharded_trace(full, _without_values(example), training=True)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            return False
        return True

    # A ring has two chunks on each rank.
    least, generator = 2 * size, torch.Generator()
    example = make_example(args, kwargs, full, size, runs, generator, torch.float64, least, widths=named_widths(unit))
    if example is None:
        return f"it does not run on fake tensors: {errors[-1]}"
    on_full = full, _without_values(example)
    wide = [unsharded_trace(*on_full, training=training) for training in _MODES]
    difference = ""
    for division in divisions(unit, example.leaves, size, kept):
        narrow = copy_of_unit(unit, division), _divided(example, division, with_values=False)
        try:
            small = [unsharded_trace(*narrow, training=training) for training in _MODES]
        except Exception as error:
            difference = difference or f"{type(error).__name__}: {error}"
            continue
        differences = (why_not_same_program(*pair, division, size) for pair in zip(wide, small, strict=True))
        if not (found := next(filter(None, differences), "")):
            inputs = _divided(example, division, with_values=True)
            new_args, new_kwargs = unflatten(list(inputs.leaves), inputs.spec)
            copy = copy_of_unit(unit, division, with_values=True)
            return NarrowLayer(copy, new_args, new_kwargs, division.factor, on_full, narrow)
        difference = difference or found
    return difference or "no width can be divided"


def _without_values(example: Example) -> Example:
    return _divided(example, Division(1, frozenset()), with_values=False)


def _divided(example: Example, division: Division, *, with_values: bool) -> Example:
    leaves = (divided_leaf(leaf, division, with_values=with_values) for leaf in example.leaves)
    return replace(example, leaves=tuple(leaves))


def plan_of_other_width(plan: UnitPlan, unit: nn.Module, other: nn.Module) -> UnitPlan:
    """Returns a plan of `unit` for `other`, a copy whose sizes are multiples or parts of the unit's sizes.

    Raises:
        ValueError: A size cannot be converted.
    """
    after = dict((*other.named_parameters(), *other.named_buffers()))

    def converted(placements: Mapping[str, Placement]) -> dict[str, Any]:
        return {
            fqn: placement.scaled_to(after[fqn].shape[placement.dim]) if isinstance(placement, Shard) else placement
            for fqn, placement in placements.items()
        }

    attributes = {
        fqn: {
            name: scaled(value, vars(unit.get_submodule(fqn))[name], vars(other.get_submodule(fqn))[name])
            for name, value in values.items()
        }
        for fqn, values in plan.attributes.items()
    }
    linears = {fqn: _linear(linear, other) for fqn, linear in plan.linears.items()}
    positions, full_sequence_plan = plan.positions, plan.full_sequence_plan
    if positions is not None:
        positions = replace(
            positions,
            features=_features(positions, plan, linears),
            parameter_shards=converted(positions.parameter_shards),
        )
    if full_sequence_plan is not None:
        full_sequence_plan = plan_of_other_width(full_sequence_plan, unit, other)
    return replace(
        plan,
        placements=converted(plan.placements),
        attributes=attributes,
        linears=linears,
        positions=positions,
        full_sequence_plan=full_sequence_plan,
    )


def _features(positions: PositionsPlan, plan: UnitPlan, linears: Mapping[str, LinearLike]) -> dict[str, Shard]:
    found = {}
    for fqn, placement in positions.features.items():
        side = "num_in" if plan.roles.get(fqn) == "row" else "num_out"
        found[fqn] = placement.scaled_to(getattr(linears[fqn], side))
    return found


def _linear(linear: LinearLike, other: nn.Module) -> LinearLike:
    shape = other.get_parameter(linear.parameter("weight")).shape
    return replace(linear, num_out=shape[linear.out_dim], num_in=shape[linear.in_dim])


def unsharded_trace(unit: nn.Module, example: Example, *, training: bool) -> ShapeTrace:
    """The trace of a unit of fake tensors, unsharded."""
    trace = ShapeTrace()
    with FAKE_MODE, quiet_fake_kernels():
        run_forward(unit.train(training), example, Setting(training), trace)
    return trace


def sharded_trace(unit: nn.Module, plan: UnitPlan, example: Example, *, training: bool, last: bool) -> ShapeTrace:
    """The trace of a unit of fake tensors on the first or the last rank of a plan.

    Raises:
        ValueError: The sequence was not sharded although the plan shards it.
    """
    context_size = plan.context if plan.by in ("context", "both") else 1
    ranks = CountedRanks((plan.size - 1) * last, plan.size)
    context = CountedRanks((context_size - 1) * last, context_size)
    with FAKE_MODE:
        shards = shards_of(unit, plan, ranks.rank).items()
        local = {fqn: shard.detach().clone().requires_grad_(shard.requires_grad) for fqn, shard in shards}
    runner = unit_on_trial(unit, plan, ranks, context, local)
    trace = ShapeTrace()
    with FAKE_MODE, quiet_fake_kernels(), runner.running():
        run_forward(unit.train(training), example, Setting(training), trace)
    if plan.by and not runner.num_sharded_sequences:
        raise ValueError("the sequence was not sharded")
    return trace
