"""Layers whose recomputation is chosen by a budget: at the floor until a batch is profiled, then by an integer program.

    batch  1 .. the first step of the optimizer     the floor: layers keep their inputs
           .. the second step of the optimizer      the floor, profiled: with optimizer states and gradients
           from then on                             the choices of the program

A layer that is called with larger inputs than in the profile, or that takes other operations, keeps nothing in that
call, and the batches up to the next step of the optimizer are profiled again. Results are bitwise those of a run
without recomputation, whatever is chosen, so each rank decides by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.budget.kept_results import Choice, choices_of
from lightning_hybrid.memory.budget.layer_choices import Solution, program_of
from lightning_hybrid.memory.budget.layer_structure import LayerStructure, structure_of
from lightning_hybrid.memory.budget.step_profile import LayerRun, SavedInRun, StepProfile
from lightning_hybrid.memory.recomputable_values_and_operations import ParameterGatherer, Use
from lightning_hybrid.memory.recomputation_tape import Tape
from lightning_hybrid.memory.selective_activation_checkpointing import RecordedRun, SelectiveCheckpointing, results_of
from lightning_hybrid.step.instrument.replay_user_activation_checkpointing import SAVES_EACH

_MAX_PROFILES = 8  # of a run: calls that none of them has seen stay at the floor


@dataclass
class LayerPlan:
    """The choices for one layer.

    Attributes:
        input_bytes: The most bytes of its inputs for which they hold.
        choices: By `LayerStructure.key`.
    """

    input_bytes: int = 0
    choices: dict[Hashable, Choice] = field(default_factory=dict)

    @property
    def keeps_all(self) -> bool:
        """Whether it runs without any recomputation."""
        return bool(self.choices) and all(choice.kept is None for choice in self.choices.values())


@dataclass(frozen=True)
class BudgetReport:
    """What a profile has shown, and what was chosen.

    Attributes:
        budget: In bytes.
        peak: That is expected, in bytes.
        floor: The lowest peak that any choices have, in bytes.
        before: Bytes that were alive as the profile began: parameters, optimizer states, and gradients if they stay.
        num_runs: Of layers in the profile.
        kept_share: By layer, the share of the bytes that autograd would save that is kept.
        recomputed_share: Of the bytes that autograd would save in all of these runs.
    """

    budget: int
    peak: int
    floor: int
    before: int
    num_runs: int
    kept_share: dict[str, float]
    recomputed_share: float


class BudgetedLayers(SelectiveCheckpointing):
    """Chooses what each layer keeps, so that the bytes of this rank stay under a budget.

    Attributes:
        report: Of the latest profile; None before there is one.
        plans: By FQN of the layer.
        least: The lowest peak that any choices had in the latest profile, in bytes.
    """

    def __init__(self, device: torch.device, budget: Callable[[int], int], name: str = "recompute") -> None:
        """Begin at the floor.

        Args:
            device: The compute device.
            budget: Returns the bytes that this rank may use, from those that it uses between two steps.
            name: The option and its value, for messages.
        """
        super().__init__(share=0.0)
        self._device, self._budget, self._name = device, budget, name
        self.plans: dict[str, LayerPlan] = {}
        self.report: BudgetReport | None = None
        self.least = 0
        self._recorded_layers: set[str] = set()  # that are recorded even if they keep everything
        self._needs_profile, self._num_profiles = True, 0
        self._profile: StepProfile | None = None
        self._before = 0
        self._mode = contextlib.ExitStack()

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def wants_profile(self) -> bool:
        """Whether the next batch should be profiled."""
        return self._needs_profile and self._num_profiles < _MAX_PROFILES

    def begin_batch(self, tensors: Iterable[Tensor], other_bytes: int | None = None) -> None:
        """Profile a batch, at the floor; several batches between two steps of the optimizer make one profile.

        Args:
            tensors: Parameters, gradients, optimizer states and buffers, of any shape.
            other_bytes: That an allocator counts as used; None where none counts them.
        """
        if self._profile is None:
            self._profile = StepProfile(self._device)
            self._num_profiles += 1
            self._profile.live.track(tensors)
            if other_bytes is not None:
                self._profile.live.add_constant(other_bytes - self._profile.live.now)
            self._before = self._profile.live.now
        else:
            self._profile.live.track(tensors)
        # Code that the user compiles runs as it is written: torch.compile refuses a dispatch mode.
        self._mode.enter_context(torch.compiler.set_stance("force_eager"))
        self._mode.enter_context(self._profile.live)

    def begin_optimizer_step(self) -> None:
        """Begin what comes after the backwards of a batch that is profiled."""
        if self._profile is not None:
            self._profile.begin_optimizer_step()

    def end_batch(self, *, has_stepped: bool) -> bool:
        """End a batch; return whether choices were made.

        Args:
            has_stepped: Whether the optimizer has stepped in it.

        Raises:
            RecomputeError: The budget is below the floor.
        """
        self._mode.close()
        profile = self._profile
        if profile is None or not has_stepped:
            return False
        profile.close()
        self._profile = None
        runs = [run for run in profile.runs if run.structure is not None or run.saved_bytes is not None]
        if not runs:
            return False
        if all(map(self._knows, runs)):  # its inputs are smaller than those that the choices are for
            self._needs_profile = False
            return False
        self._choose_from(profile)
        return True

    def allowed_bytes(self, before: int) -> int:
        """Return the bytes that this rank may use now.

        Args:
            before: Those that it uses.

        Raises:
            RecomputeError: The budget is a share, and the free memory is unknown.
        """
        return self._budget(before)

    def close(self) -> None:
        """Leave the batch that is profiled, if there is one."""
        self._mode.close()
        self._profile = None

    def _choose_from(self, profile: StepProfile) -> None:
        def choices(fqn: str, structure: LayerStructure) -> Sequence[Choice]:
            return choices_of(structure, self._device.type, always_recorded=fqn in self._recorded_layers)

        budget = self._budget(self._before)
        program = program_of(profile, choices)
        lowest = program.lowest()
        self.least = lowest.peak
        if lowest.peak > budget:
            raise RecomputeError(self._floor_message(budget, lowest), entry="recompute-budget")
        solution = program.solve(budget) or lowest
        kept_share: dict[str, float] = {}
        kept_bytes = saved_bytes = 0.0
        for (fqn, key), group in program.layers.items():
            choice = solution.choices[fqn, key]
            self.plans.setdefault(fqn, LayerPlan()).choices[key] = choice
            total = sum(step.nbytes for step in group.largest.steps if step.is_saved)
            kept = sum(group.largest.steps[number].nbytes for number in choice.kept or ())
            kept_share[fqn] = 1.0 if choice.kept is None or not total else kept / total
            kept_bytes += kept_share[fqn] * total * group.num_runs
            saved_bytes += total * group.num_runs
        num_runs = self._end_profile(profile)
        share = recomputed_share(kept_bytes, saved_bytes)
        self.report = BudgetReport(budget, solution.peak, lowest.peak, self._before, num_runs, kept_share, share)

    def _knows(self, run: LayerRun) -> bool:
        """Return whether there is a choice for a profiled run, made for inputs that are as large."""
        plan, key = self.plans.get(run.fqn), None if run.structure is None else run.structure.key
        return plan is not None and key in plan.choices and run.input_bytes <= plan.input_bytes

    def _end_profile(self, profile: StepProfile) -> int:
        """Note for which inputs the choices hold; return the number of runs."""
        runs = list(profile.runs)
        for run in runs:
            self.plans[run.fqn].input_bytes = 0  # choices for larger inputs, of an earlier profile, are replaced
        for run in runs:
            plan = self.plans[run.fqn]
            plan.input_bytes = max(plan.input_bytes, run.input_bytes)
        self._needs_profile = False
        return len(runs)

    def _floor_message(self, budget: int, lowest: Solution) -> str:
        run, kind = lowest.time.run, lowest.time.kind
        fqn = None if run is None else run.fqn
        where = {
            "enter": f"in the forward of {fqn}",
            "leave": f"after the forward of {fqn}, in what follows it before the next layer",
            "restore": f"in the backward of {fqn}",
            "restored": f"in the backward of {fqn}",
            "release": f"in the backward of {fqn}, or between it and the next layer's",
            "optimizer": "in the step of the optimizer",
        }.get(kind or "", "before the first layer")
        return (
            f"{self._name} allows {budget:,.0f} bytes on this rank, and at least {lowest.peak:,.0f} bytes are"
            f" needed, even if all layers are recomputed: the peak is {where}, and {self._before:,.0f} bytes of it"
            " are parameters, gradients and optimizer states that are there between steps; allow at least the number"
            " of bytes that is needed, or reduce it by more microbatches, zero_stage=3, or more stages or tensor ranks"
        )

    # -- layers -------------------------------------------------------------------------------------------------------

    def wrap(
        self, forward: Callable[..., Any], fqn: str = "", gatherer: ParameterGatherer | None = None
    ) -> Callable[..., Any]:
        """Wraps ``forward``, as `SelectiveCheckpointing.wrap`: it runs by the choices that are made at the time."""
        recorded = super().wrap(forward, fqn, gatherer)
        if gatherer is not None:
            self._recorded_layers.add(fqn)
            return recorded

        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self.plans.get(fqn)
            if self._profile is None and plan is not None and plan.keeps_all:
                tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if type(leaf) is Tensor]
                if self._has_seen(plan, _nbytes(tensors)):
                    return forward(*args, **kwargs)
            return recorded(*args, **kwargs)

        return run

    def _has_seen(self, plan: LayerPlan, input_bytes: int) -> bool:
        """Return whether a call is within what was profiled; requests a profile otherwise."""
        if input_bytes <= plan.input_bytes:
            return True
        self._needs_profile = True
        return False

    def _recorded(self, fqn: str, inputs: Sequence[Tensor]) -> RecordedRun:
        input_bytes = _nbytes(inputs)
        if self._profile is not None:
            return _ProfiledRun(self._profile, self._profile.enter(fqn, input_bytes))

        def kept(tape: Tape) -> frozenset[int]:
            plan = self.plans.get(fqn)
            if plan is None or not self._has_seen(plan, input_bytes):
                return _unavoidable(tape)
            structure_key = key_of(tape)
            choice = plan.choices.get(structure_key)
            if choice is None:
                self._needs_profile = True
                return _unavoidable(tape)
            return _saved_operations(tape) if choice.kept is None else choice.kept

        return RecordedRun(kept)


class _ProfiledRun(RecordedRun):
    """One run of a layer in a batch that is profiled."""

    def __init__(self, profile: StepProfile, run: LayerRun) -> None:
        super().__init__(self._structured)
        self._profile, self._run = profile, run
        self._saved: list[int] = []  # ids of values

    def hooks(self, tape: Tape, restore: Callable[[Any], Tensor]) -> tuple[Callable[[Tensor], Any], Callable[..., Any]]:
        """Returns hooks that also record when tensors are restored and released."""
        profile, run = self._profile, self._run

        def save(tensor: Tensor) -> SavedInRun:
            content = tape.save(tensor)
            self._saved.append(id(content.value) if isinstance(content, Use) else 0)
            return profile.saved(run, content, len(self._saved) - 1)

        def restored(saved: SavedInRun) -> Tensor:
            profile.begin_restore(run, saved)
            tensor = restore(saved.content)
            profile.end_restore(run, saved)
            return tensor

        setattr(save, SAVES_EACH, True)
        return save, restored

    def _structured(self, tape: Tape) -> frozenset[int]:
        self._run.structure = structure_of(tape, self._saved)
        return self._run.structure.unavoidable

    def end(self) -> None:
        """Ends the forward."""
        self._profile.leave(self._run)


def recomputed_share(kept_bytes: float, saved_bytes: float) -> float:
    """Returns the share of saved bytes that is not kept, at least 0."""
    return max(0.0, 1.0 - kept_bytes / saved_bytes) if saved_bytes else 0.0


def key_of(tape: Tape) -> Hashable:
    """Returns `LayerStructure.key` of the run that is on a tape."""
    names = tuple(str(operation.function) for operation in tape.operations)
    return names, tuple(any(value.num_saved for value in results_of(operation)) for operation in tape.operations)


def _saved_operations(tape: Tape) -> frozenset[int]:
    found = enumerate(tape.operations)
    return frozenset(n for n, operation in found if any(value.num_saved for value in results_of(operation)))


def _unavoidable(tape: Tape) -> frozenset[int]:
    """Returns the operations whose results stay in memory anyway."""
    chosen: list[int] = []
    for number, operation in enumerate(tape.operations):
        results = results_of(operation)
        if any(value.num_saved for value in results) and all(
            value.tensor is not None and (value.is_returned or value.is_pinned) for value in results
        ):
            chosen.append(number)
    return frozenset(chosen)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
