"""The proof that a sharded unit is equivalent to the unit: equal outputs, gradients and buffers, in all modes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.copies import random_copy
from lightning_hybrid.equivalence.deterministic import DeterministicMode
from lightning_hybrid.equivalence.difference import difference_of
from lightning_hybrid.params import store
from lightning_hybrid.step.tracing.lines import user_call_sites
from lightning_hybrid.tensor.plan import PositionsPlan, UnitPlan
from lightning_hybrid.tensor.proof.drawn import in_general_position
from lightning_hybrid.tensor.proof.example import Example, make_example, spread_rows
from lightning_hybrid.tensor.proof.trials import (
    Outcome,
    Setting,
    TrialFailed,
    TrialRanks,
    local_and_expected,
    run_unsharded,
)
from lightning_hybrid.tensor.runtime.proved import dims_of_several, value_read_in

TOLERANCE = 1e-9  # relative to the largest element, in float64: only the order of sums differs
NOT_SHARDED = "nothing was sharded"
LOOSE_TOLERANCE = 1e-4  # in float32, or where user code casts to it
_TINY = 1e-4  # its effects are above the tolerance, beside numbers of ordinary size
_LARGE = {torch.float64: 1e3, torch.float32: 10.0}  # that scores of attention are still exact enough
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_LEAST = 1e-6  # the smallest scale of a position


@dataclass
class Proof:
    """Compares sharded runs of a unit with the unsharded unit on one example.

    Attributes:
        first: Train mode with gradients: the setting that finds most errors.
        eval_mode: Eval mode without gradients, in which units may run other code than in training.
        without_modes: Eval mode without function modes, as in a run of the user: torch takes other paths there.
        settings: The settings in which a plan must pass.
        sharded_outputs: Outputs of the last run that had the local size along one dim: index -> dim.
        relative_error: What the last run differed by; infinite where not by numbers alone.
    """

    unit: nn.Module  # a copy of the unit with random weights
    example: Example  # its arguments
    ranks: TrialRanks  # runs it on all ranks
    dtype: torch.dtype  # dtype of weights and arguments
    # Outcomes of the unsharded unit, which proofs of the same example on other ranks share.
    _references: dict[str, tuple[Outcome, frozenset[str]]] = field(default_factory=dict)  # and missing gradients
    _same_as_first: dict[str, bool] = field(default_factory=dict)
    _on_outliers: dict[str, Outcome | None] = field(default_factory=dict)  # None where the unit itself raises

    def __post_init__(self) -> None:
        first = self.first = Setting(dtype=self.dtype)
        self.eval_mode = replace(first, training=False, grad=False)
        self.without_modes = replace(self.eval_mode, exact=False)
        others = [replace(first, training=False), replace(first, grad=False)]
        self.settings = [first, *others, self.eval_mode, self.without_modes]
        self.sharded_outputs: dict[int, int] = {}
        self.relative_error = math.inf

    def on(self, size: int, context: int = 1) -> Proof:
        """Makes a proof of the same example on other numbers of tensor and context ranks."""
        return replace(self, ranks=TrialRanks(self.unit, size, context, copies=self.ranks.copies))

    def reference(self, setting: Setting, without: Collection[str] = ()) -> Outcome:
        """The outcome of the unsharded unit, which runs once for each setting.

        Gradients of the parameters in `without` may be missing.
        """
        key = f"{setting} {setting.exact}"
        cached = self._references.get(key)
        if cached is None or not cached[1] <= set(without):
            outcome = run_unsharded(self.unit, self.example, setting, without)
            cached = self._references[key] = outcome, frozenset(without)
        return cached[0]

    def difference(
        self,
        plan: UnitPlan,
        setting: Setting,
        *,
        learning: bool = False,
        forward_only: bool = False,
        without: Collection[str] = (),
    ) -> str | None:
        """Runs the unit by a plan; returns the first difference from the unsharded unit, or None.

        A run that learns makes the rules of the plan. Gradients of the parameters ``without`` are not compared.
        """
        outcomes = self.outcomes(plan, setting, learning=learning, forward_only=forward_only, without=without)
        if isinstance(outcomes, str) or forward_only:
            return outcomes if isinstance(outcomes, str) else None
        expected, tolerance = self.reference(setting, () if learning else without), self._tolerance(setting)
        # While learning, a rank that sees only its slice of a norm's statistics cannot have all of them.
        for kind in ("grads",) if learning else ("grads", "buffers"):
            for name, wanted in getattr(expected, kind).items():
                if kind == "grads" and name in without:
                    continue
                for found, shard in local_and_expected(outcomes, plan, name, kind, wanted):
                    for each in found:
                        if (error := difference_of(each, shard, tolerance, full=wanted)) is not None:
                            self.relative_error = error.relative
                            return f"{kind[:-1]} of {name} in {setting}: {error}"
        return None

    def outcomes(
        self,
        plan: UnitPlan,
        setting: Setting,
        *,
        learning: bool = False,
        forward_only: bool = False,
        without: Collection[str] = (),
    ) -> list[Outcome] | str:
        """Runs the unit by a plan; returns the outcomes of all ranks, a failure, or the first difference of outputs."""
        self.sharded_outputs, self.relative_error = {}, math.inf
        expected = self.reference(setting, () if learning else without)
        wrong: list[str] = []

        def are_right(outcomes: list[Outcome]) -> bool:  # else nothing is run backward
            wrong.extend(filter(None, [self._outputs_differ(outcomes, expected, setting)]))
            return not wrong and not forward_only

        try:
            found = self.ranks.run(plan, self.example, setting, learning=learning, check=are_right, without=without)
        except TrialFailed as failure:
            return str(failure)
        if plan.by and not self._was_sequence_sharded():
            return NOT_SHARDED
        return wrong[0] if wrong else found

    def _was_sequence_sharded(self) -> bool:
        """Whether the last run was one of local positions; an example may have fewer positions than ranks."""
        unit = self.ranks.first_unit
        return unit is not None and unit.num_sharded_sequences > 0

    def _outputs_differ(self, outcomes: list[Outcome], expected: Outcome, setting: Setting) -> str | None:
        """The first difference between outputs of ranks and of the unsharded unit, or None."""
        for rank, outcome in enumerate(outcomes):
            if len(outcome.outputs) != len(expected.outputs):
                return f"rank {rank} returns {len(outcome.outputs)} values, not {len(expected.outputs)}"
            self.sharded_outputs |= self._sharded_outputs(outcome, expected)
            for index, (found, wanted) in enumerate(zip(outcome.outputs, expected.outputs, strict=True)):
                if (error := difference_of(found, wanted, self._tolerance(setting))) is not None:
                    self.relative_error = error.relative
                    return f"output {index} of rank {rank} in {setting}: {error}"
        return None

    def _tolerance(self, setting: Setting) -> float:
        return TOLERANCE if setting.exact and self.dtype is torch.float64 else LOOSE_TOLERANCE

    def _sharded_outputs(self, outcome: Outcome, expected: Outcome) -> dict[int, int]:
        found = {}
        for index, (local, wanted) in enumerate(zip(outcome.outputs, expected.outputs, strict=True)):
            if isinstance(local, Tensor) and isinstance(wanted, Tensor) and local.dim() == wanted.dim():
                differ = [dim for dim in range(local.dim()) if local.shape[dim] != wanted.shape[dim]]
                if len(differ) == 1 and local.shape[differ[0]] * self.ranks.size == wanted.shape[differ[0]]:
                    found[index] = differ[0]
        return found

    def first_failure(self, plan: UnitPlan) -> str | None:
        """The first difference in any setting, or None if the plan is proved."""
        failures = (self.difference(plan, setting) for setting in self.settings if not self.runs_as_first(setting))
        failure = next((failure for failure in failures if failure is not None), None)
        return self._failure_on_outliers(plan, plan.positions) if failure is None and plan.positions else failure

    def _failure_on_outliers(self, plan: UnitPlan, positions: PositionsPlan) -> str | None:
        """The first difference on examples whose positions differ much, or None; outputs and buffers are compared."""
        train = replace(self.first, grad=False)
        settings = [train] if self.runs_as_first(self.eval_mode) else [train, self.eval_mode]
        leaf, dim = positions.leaf_index, positions.dim
        length = self.example.leaves[leaf].shape[dim]
        for (text, example), setting in itertools.product(outlier_examples(self.example, leaf, dim), settings):
            key = f"{text} {leaf} {dim} {setting}"
            if key not in self._on_outliers:
                self._on_outliers[key] = None
                with contextlib.suppress(Exception):
                    self._on_outliers[key] = run_unsharded(self.unit, example, setting)
            expected = self._on_outliers[key]
            if expected is None:
                continue
            try:
                outcomes = self.ranks.run(plan, example, setting)
            except TrialFailed as failure:
                return f"{failure} (in {setting}, of a sequence with {text})"
            for outcome in outcomes:
                found = [*outcome.outputs, *[outcome.buffers[name] for name in expected.buffers]]
                wanted = [*expected.outputs, *expected.buffers.values()]
                pairs = zip(found, wanted, strict=True)
                differences = (difference_on_outliers(*pair, length, dim) for pair in pairs)
                if error := next(filter(None, differences), None):
                    return f"{error} (in {setting}, of a sequence with {text})"
        return None

    def runs_as_first(self, setting: Setting) -> bool:
        """Whether the unit makes the same torch calls from the same lines as in the first setting, bit for bit.

        A proof in the first setting holds in such a setting too: no rule of a plan can tell the two apart.
        """
        if not setting.exact or setting == self.first:
            return False
        cached = self._same_as_first.get(str(setting))
        if cached is None:
            first = self.reference(self.first)
            forward = partial(run_unsharded, self.unit, self.example, setting, backward=False)
            here = forward() if setting.grad else self.reference(setting)
            cached = self._same_as_first[str(setting)] = (
                here.path == first.path
                and len(here.outputs) == len(first.outputs)
                and all(map(_are_equal, here.outputs, first.outputs))
                and all(map(_are_equal, here.buffers.values(), first.buffers.values()))
            )
        return cached

    @property
    def calls(self) -> frozenset[int]:
        """The lines of code that called torch in unsharded runs so far, and the dims of the arguments."""
        lines = frozenset(call for outcome, _ in self._references.values() for call in user_call_sites(outcome.path))
        return lines | dims_of_several(self.example.leaves).keys()

    @property
    def value_read(self) -> str:
        """The first line at which the unit has read values of tensors; "" if there is none."""
        return next(filter(None, (value_read_in(outcome.path) for outcome, _ in self._references.values())), "")

    def run_unit(self) -> None:
        """Runs the unsharded unit once on its example."""
        _run(self.unit, self.example, self.dtype)


def proof_of(
    unit: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    size: int,
    vocabulary: Mapping[str, int] | None = None,
    *,
    context: int = 1,
    least: int = 1,
    seed: int = 0,
) -> Proof | str:
    """Makes the proof of a unit, or returns why that is not possible.

    The example has ``least`` positions or more, and looks up rows of each rank in the parameters of the vocabulary.
    """
    if size * context == 1:
        return "there is one tensor rank"
    generator = torch.Generator().manual_seed(seed)
    errors: list[Exception] = []
    # Some kernels have no float64; float32 finds errors too, with a larger tolerance.
    for dtype in (torch.float64, torch.float32):
        try:
            unit_copy = random_copy(unit, generator, dtype)
        except Exception as error:
            return f"the unit cannot be copied: {type(error).__name__}: {error}"
        runs = partial(_can_run, unit_copy, dtype, errors)
        example = make_example(args, kwargs, unit_copy, size * context, runs, generator, dtype, max(context, least))
        # Code with casts may run only in its own dtype where no function mode is active.
        if example is not None:
            if vocabulary:
                lengths = {unit_copy.get_parameter(name).shape[dim] for name, dim in vocabulary.items()}
                example = spread_rows(example, lengths, runs)
            found = in_general_position(unit_copy, example, partial(_lines, unit_copy, dtype), generator)
            if isinstance(found, str):
                return found
            example = found
            proof = Proof(unit_copy, example, TrialRanks(unit_copy, size, context), dtype)
            if written_name := _parameter_written_by(proof):
                return f"its forward writes {written_name}, which ranks would do to copies"
            if dtype is torch.float32 or _runs_without_modes(proof):
                return proof
    return f"a copy of the unit with random weights does not run: {errors[-1]}"


@torch.no_grad()
def _parameter_written_by(proof: Proof) -> str:
    """FQN of a parameter that the forward writes (renormalizes, clamps); "" if there is none."""
    parameters = dict(proof.unit.named_parameters())
    before = {name: parameter.data for name, parameter in parameters.items()}
    large = {name: (data * 1000).to(data.dtype) for name, data in before.items()}  # outside of any range or norm
    try:
        for name, parameter in parameters.items():
            store.swap_in(parameter, large[name].clone())
        with contextlib.suppress(Exception):  # large numbers may overflow
            run_unsharded(proof.unit, proof.example, proof.first, backward=False)
        return next((name for name, p in parameters.items() if not torch.equal(p.data, large[name])), "")
    finally:
        for name, parameter in parameters.items():
            store.swap_out(parameter, before[name])


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b)


def _run(unit: nn.Module, example: Example, dtype: torch.dtype) -> None:
    args, kwargs, _ = example.call()
    with DeterministicMode(dtype):
        unit(*args, **kwargs)


def _can_run(unit: nn.Module, dtype: torch.dtype, errors: list[Exception], example: Example) -> bool:
    try:
        with torch.no_grad():
            _run(unit, example, dtype)
        return True
    except Exception as error:
        errors.append(error)
        return False


def _lines(unit: nn.Module, dtype: torch.dtype, example: Example) -> Collection[int] | None:
    """The lines of a unit that call torch on an example; None if it does not run, or has results that are not finite.

    Zero is among them where it draws random numbers, such as for a probability of dropout.
    """
    setting = Setting(grad=False, dtype=dtype)
    try:
        outcome = run_unsharded(unit, example, setting)
    except Exception:
        return None
    if not all(bool(each.isfinite().all()) for each in outcome.outputs if isinstance(each, Tensor)):
        return None
    before = torch.get_rng_state()
    with contextlib.suppress(Exception):
        run_unsharded(unit, example, replace(setting, exact=False))
    return {*user_call_sites(outcome.path), *([] if torch.equal(before, torch.get_rng_state()) else [0])}


def _runs_without_modes(proof: Proof) -> bool:
    try:
        proof.reference(proof.without_modes)
        return True
    except Exception:
        return False


def prove_cached(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: UnitPlan) -> UnitPlan | None:
    """Proves a plan of a structurally equal unit for this unit; returns it with its costs, or None if it fails."""
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        least = 1
        if plan.positions is not None:
            least = plan.size * plan.context if plan.by == "both" else plan.size
            least = max(least, 2 * plan.context * plan.positions.ring_attention)
        proof = proof_of(unit, args, kwargs, plan.size, plan.vocabulary, context=plan.context, least=least)
        if isinstance(proof, str) or proof.first_failure(plan) is not None or proof.value_read:
            return None
        num_trials = proof.ranks.num_trials
        full_sequence_plan = plan.full_sequence_plan
        if plan.by == "tensor":  # of calls with fewer positions than ranks
            full_sequence_plan = replace(plan, positions=None)
        if full_sequence_plan is not None:
            proof = proof.on(plan.size)
            if proof.first_failure(full_sequence_plan) is not None:
                return None
            num_trials += proof.ranks.num_trials
    return replace(plan, calls=proof.calls, num_trials=num_trials, seconds=time.perf_counter() - began)


# Examples whose positions differ so much that a layer of local positions would decide otherwise than the full layer.
# Random numbers of one scale reach few thresholds: `torch.where(h.abs().max() > 50, h / 2, h)` is `h` on each rank and
# in the full layer, until an outlier comes. In these examples one rank has an outlier, one has almost zeros, or all
# positions are equal, as where all tokens go to one expert.


def outlier_examples(example: Example, leaf_index: int, dim: int) -> Iterator[tuple[str, Example]]:
    """Yields examples of the same shapes, each with its description."""
    leaf = example.leaves[leaf_index]
    length = leaf.shape[dim]
    shape = [length if other == dim else 1 for other in range(leaf.dim())]
    large = _LARGE.get(leaf.dtype, 10.0)
    scales = torch.ones(length, dtype=leaf.dtype)
    scales[length // 2 :], scales[0] = _TINY, large
    invalid = torch.ones(length, dtype=leaf.dtype)
    invalid[-1] = torch.inf
    with torch.no_grad():
        changed = {
            "an outlier in its first position": leaf * scales.view(shape),
            "an outlier in its last position": leaf * scales.flip(0).view(shape),
            "infinite numbers in its last position": leaf * invalid.view(shape),
            "equal positions": leaf.narrow(dim, 0, 1).expand_as(leaf).clone(),
        }
    for text, value in changed.items():
        leaves = list(example.leaves)
        leaves[leaf_index] = value.requires_grad_(leaf.requires_grad)
        yield text, replace(example, leaves=tuple(leaves))


def difference_on_outliers(found: Any, wanted: Any, length: int, dim: int) -> str | None:
    """The difference between two values where both are finite, each position by its own scale; or None."""
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        return difference_of(found, wanted, 0.0)
    if found.shape != wanted.shape or not wanted.is_floating_point():
        return difference_of(found, wanted, 0.0)
    tolerance = _TOLERANCES.get(wanted.dtype, 5e-2)
    is_finite = found.isfinite() & wanted.isfinite()
    found, wanted = (torch.where(is_finite, value.detach(), 0.0) for value in (found, wanted))
    if wanted.dim() > dim and wanted.shape[dim] == length:
        others = [other for other in range(wanted.dim()) if other != dim]
        scale = (wanted.abs().amax(others, keepdim=True) if others else wanted.abs()).clamp(min=_LEAST)
        found, wanted = found / scale, wanted / scale
    return difference_of(found, wanted, tolerance)
