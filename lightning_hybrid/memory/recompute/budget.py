"""Layers whose recomputation is chosen by a budget: in full until a batch is profiled, then by an integer program.

    batch  1 .. the first step of the optimizer     layers keep their inputs
           .. the second step of the optimizer      they do too, profiled: with optimizer states and gradients
           from then on                             each layer takes its choice

A layer keeps everything, or the results of products up to a share of its bytes, or its inputs alone. A compiled layer
keeps everything or its inputs: its compiler decides what it saves, about as much as the same code uncompiled or less.

    maximize  sum work[l, c] * y[l, c]    subject to    sum_c y[l, c] <= 1                                for each layer
              peak[t] + sum bytes[t, l, c] * y[l, c] <= budget                                        for each interval

``work`` is what choice c of layer l spares in its backward. ``bytes`` is what it holds for all runs of the layer whose
forward has ended and whose backward has not begun, and what a forward or a repetition takes more: in its backward a
layer has its saved tensors in memory whatever is chosen. Results are bitwise equal for all choices, so each rank
decides by itself, unless ranks communicate in layers.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.live import LiveBytes
from lightning_hybrid.memory.recompute.selective import (
    NO_COSTS,
    KeptResult,
    LayerCosts,
    LayerRun,
    MeasuredRun,
    plain_tensors,
    storage_bytes,
)

# Parts of the bytes of a layer, up to which it may keep results of products.
SHARES = tuple(tenths / 10 for tenths in range(1, 10))
EVERYTHING = len(SHARES) + 1  # the highest level; 0 keeps inputs alone
_MAX_PROFILES = 8  # of a run: calls that none of them has seen are recomputed in full
_SECONDS = 20.0  # after which the best choice so far is taken
_GAP = 2e-3  # of the work, at which the search ends


Kind = Literal["enter", "leave", "restore", "restored", "optimizer"]


class ProfiledRun(MeasuredRun):
    """One run of a layer that is recomputed in full.

    Attributes:
        fqn: Of the layer.
        measured: Its costs, once its forward has ended.
        bytes_before: That were alive before its forward.
        forward_bytes: The peak of its forward if nothing that it saves is released, above what was alive before.
    """

    def __init__(self, profile: StepProfile, fqn: str, inputs: Iterable[Tensor]) -> None:
        super().__init__(inputs)
        self.fqn, self._profile = fqn, profile
        self.measured, self._has_returned = NO_COSTS, False
        self.bytes_before, self.forward_bytes = profile.live.now, 0
        profile.mark("enter", self)

    def returned(self, out: Any) -> None:
        """Ends the forward."""
        self.measured, self._has_returned = self.costs(plain_tensors(out)), True
        self._profile.mark("leave", self)

    def begin_repetition(self) -> dict[int, KeptResult]:
        """Begins to repeat the forward, as the backward begins."""
        if self._has_returned:
            self._profile.mark("restore", self)
        self._bytes = self._profile.live.now
        return super().begin_repetition()

    def end_repetition(self) -> None:
        """Ends what `begin_repetition` began."""
        super().end_repetition()
        if self._has_returned:
            self.forward_bytes = self._profile.live.peak - self._bytes
            self._profile.mark("restored", self)


class Interval(NamedTuple):
    """The time after one event until the next one."""

    kind: Kind | None  # of the event that begins it
    run: ProfiledRun | None  # the layer's run that the event belongs to; None at the beginning, and for "optimizer"
    peak: int  # the most bytes that were alive in it


class StepProfile:
    """Records training batches: a batch is cut into intervals by the events of its layers, each with its peak.

    So microbatches in flight, gradients, messages and gathered parameters are in the numbers, under any schedule.

    Attributes:
        live: The mode under which they run.
        intervals: In order, without the one that lasts.
    """

    def __init__(self, device: torch.device) -> None:
        """Records tensors of the type of ``device``."""
        self.live = LiveBytes(device)
        self.intervals: list[Interval] = []
        self._last: tuple[Kind | None, ProfiledRun | None] = None, None
        self._is_closed = False

    def mark(self, kind: Kind | None, run: ProfiledRun | None = None) -> None:
        """Ends an interval and begins the next one."""
        if not self._is_closed:
            self.intervals.append(Interval(*self._last, self.live.begin_interval()))
            self._last = kind, run

    def close(self) -> None:
        """Ends the last interval, and records nothing more."""
        self.mark(None)
        self._is_closed = True

    @property
    def runs(self) -> list[ProfiledRun]:
        """The runs of layers, in order."""
        return [run for kind, run, _ in self.intervals if kind == "leave" and run is not None]

    @property
    def highest(self) -> Interval:
        """The interval with the most bytes."""
        return max(self.intervals, key=lambda interval: interval.peak)


@dataclass(frozen=True)
class LayerPlan:
    """A choice for one layer."""

    level: int  # 0, or `EVERYTHING`, or the number of one of `SHARES`, from 1
    input_bytes: int  # the most bytes of its inputs for which it holds
    costs: LayerCosts  # of its run with the most saved bytes

    @property
    def keeps_all(self) -> bool:
        """Whether it runs without any recomputation."""
        return self.level == EVERYTHING

    @cached_property
    def kept(self) -> frozenset[int]:
        """The products whose results it keeps."""
        return self.costs.chosen(SHARES[self.level - 1]) if 0 < self.level < EVERYTHING else frozenset()

    def bytes_of(self, costs: LayerCosts, *, unsaved: bool = False) -> int:
        """Returns the bytes that a run keeps besides its inputs; ``unsaved``: bytes that autograd would not save."""
        if self.keeps_all:
            return 0 if unsaved else costs.saved_bytes
        return costs.kept_bytes(self.kept, unsaved=unsaved)

    @property
    def work(self) -> float:
        """What its backward does not repeat, in floating-point operations."""
        works = (self.costs.products[number].work for number in self.kept)
        return self.costs.work if self.keeps_all else sum(filter(math.isfinite, works))

    @property
    def kept_share(self) -> float:
        """The part of the bytes that autograd would save which it keeps."""
        if self.keeps_all:
            return 1.0
        kept = self.bytes_of(self.costs) - self.bytes_of(self.costs, unsaved=True)
        return kept / self.costs.saved_bytes if kept else 0.0


_IN_FULL = LayerPlan(0, sys.maxsize, NO_COSTS)  # of a layer for which nothing is chosen yet


@dataclass(frozen=True)
class BudgetReport:
    """What a profile has shown, and what was chosen."""

    budget: int  # in bytes
    peak: int  # that is expected, in bytes
    floor: int  # the peak if all layers are recomputed in full, in bytes
    before: int  # bytes that were alive as the profile began: parameters, optimizer states, and gradients if they stay
    num_runs: int  # of layers in the profile
    kept_share: dict[str, float]  # by layer, the share of the bytes that autograd would save that is kept
    recomputed_share: float  # of the bytes that autograd would save in all of these runs


class BudgetedLayers:
    """Chooses what each layer keeps, so that the bytes of this rank stay under a budget.

    Attributes:
        report: Of the latest profile; None before there is one.
        plans: By FQN of the layer.
        allowed_bytes: Returns the bytes that this rank may use, from those that it uses between two steps.
    """

    is_agreed = False  # whether ranks take the same choices, whatever their inputs are

    def __init__(
        self, device: torch.device, budget: Callable[[int], int], name: str = "recompute", *, in_full: bool = False
    ) -> None:
        """Begins with layers that keep their inputs alone; compiled layers keep everything or nothing, ``in_full``."""
        self._device, self.allowed_bytes, self._name = device, budget, name
        self._levels = (EVERYTHING,) if in_full else tuple(range(1, EVERYTHING + 1))
        self.plans: dict[str, LayerPlan] = {}
        self.report: BudgetReport | None = None
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
        """Profiles a batch; several batches between two steps of the optimizer make one profile.

        Tensors are parameters, gradients, optimizer states and buffers, of any shape; ``other_bytes`` are what an
        allocator counts as used, if one counts them.
        """
        begins = self._profile is None
        self._profile = self._profile or StepProfile(self._device)
        self._num_profiles += begins
        live = self._profile.live
        live.track(tensors)
        if begins:
            if other_bytes is not None:
                live.add_constant(other_bytes - live.now)
            self._before = live.now
        # Compiled code runs as it is written: a mode cannot count what it allocates.
        self._mode.enter_context(torch.compiler.set_stance("force_eager"))
        self._mode.enter_context(live)

    def begin_optimizer_step(self) -> None:
        """Begins what comes after the backwards of a batch that is profiled."""
        if self._profile is not None:
            self._profile.mark("optimizer")

    def end_batch(self, *, has_stepped: bool) -> bool:
        """Ends a batch, in which the optimizer may have stepped; returns whether choices were made.

        Raises:
            RecomputeError: The budget is below the floor.
        """
        self._mode.close()
        profile = self._profile
        if profile is None or not has_stepped:
            return False
        profile.close()
        self._profile, self._needs_profile = None, False
        runs = profile.runs
        program, error = None, None
        if runs and not all(map(self._knows, runs)):  # or its inputs are smaller than those that the choices are for
            try:
                program = self._choose_from(profile)
            except RecomputeError as refusal:
                error = refusal
        self.plans = {
            fqn: replace(self.plans[fqn], level=level)
            for fqn, level in self.agreed({fqn: plan.level for fqn, plan in self.plans.items()}, error).items()
        }
        if program is not None:
            self.report = self._report(program, runs)
        return program is not None

    def agreed(self, levels: Mapping[str, int], error: RecomputeError | None) -> Mapping[str, int]:
        """Returns the levels that all ranks take, by FQN, from this rank's choice; here, each rank takes its own.

        Raises:
            RecomputeError: It could not choose.
        """
        if error is not None:
            raise error
        return levels

    def close(self) -> None:
        """Leaves the batch that is profiled, if there is one."""
        self._mode.close()
        self._profile = None

    def _knows(self, run: ProfiledRun) -> bool:
        """Whether there is a choice for a profiled run, made for inputs that are as large."""
        return run.fqn in self.plans and run.measured.input_bytes <= self.plans[run.fqn].input_bytes

    def _choose_from(self, profile: StepProfile) -> _Program:
        budget, highest = self.allowed_bytes(self._before), profile.highest
        if highest.peak > budget:
            raise RecomputeError(self._floor_message(budget, highest), entry="recompute-budget")
        program = _Program(profile, self._levels)
        self.plans |= program.solve(budget)
        return program

    def _report(self, program: _Program, runs: Sequence[ProfiledRun]) -> BudgetReport:
        shares = {run.fqn: self.plans[run.fqn].kept_share for run in runs}
        total = sum(run.measured.saved_bytes for run in runs)
        kept = sum(shares[run.fqn] * run.measured.saved_bytes for run in runs)
        recomputed = max(0.0, 1.0 - kept / total) if total else 0.0
        budget, peak, floor = self.allowed_bytes(self._before), program.peak(self.plans), program.floor
        return BudgetReport(budget, peak, floor, self._before, len(runs), shares, recomputed)

    def _floor_message(self, budget: int, highest: Interval) -> str:
        fqn = "" if highest.run is None else highest.run.fqn
        where = {
            "enter": f"in the forward of {fqn}",
            "leave": f"after the forward of {fqn}, in what follows it before the next layer",
            "restore": f"in the backward of {fqn}",
            "restored": f"in the backward of {fqn}, or between it and the next layer's",
            "optimizer": "in the step of the optimizer",
        }.get(highest.kind or "", "before the first layer")
        return (
            f"{self._name} allows {budget:,.0f} bytes on this rank, and at least {highest.peak:,.0f} bytes are"
            f" needed, even if all layers are recomputed: the peak is {where}, and {self._before:,.0f} bytes of it"
            " are parameters, gradients and optimizer states that are there between steps; allow at least the number"
            " of bytes that is needed, or reduce it by more microbatches, zero_stage=3, or more stages or tensor ranks"
        )

    # -- layers -------------------------------------------------------------------------------------------------------

    def next_run(self, fqn: str, inputs: Sequence[Tensor]) -> LayerRun | None:
        """Begins a run of a layer with these inputs of any shape; returns None if it keeps everything."""
        if self._profile is not None:
            return ProfiledRun(self._profile, fqn, inputs)
        plan = self.plans.get(fqn, _IN_FULL)
        if storage_bytes(inputs) > plan.input_bytes:
            self._needs_profile = True
            plan = plan if self.is_agreed else _IN_FULL
        return None if plan.keeps_all else LayerRun(plan.kept, plan.bytes_of(plan.costs))


class _Program:
    """The integer program of one profile.

    Attributes:
        floor: The peak without any choice, in bytes.
    """

    def __init__(self, profile: StepProfile, levels: Sequence[int]) -> None:
        largest: dict[str, LayerPlan] = {}
        for run in profile.runs:
            costs = run.measured
            before = largest.get(run.fqn, LayerPlan(0, 0, costs))
            inputs = max(before.input_bytes, costs.input_bytes)
            most = max(before.costs, costs, key=lambda each: each.saved_bytes)
            largest[run.fqn] = LayerPlan(0, inputs, most)
        self._in_full = largest
        self._choices = {fqn: [replace(plan, level=level) for level in levels] for fqn, plan in largest.items()}
        self._num_levels = len(levels)
        self._number_of = {fqn: number for number, fqn in enumerate(largest)}
        self._num_runs = Counter(run.fqn for run in profile.runs)
        self._rows, self._peaks = self._constraints(profile.intervals)
        self.floor = profile.highest.peak

    def solve(self, budget: int) -> dict[str, LayerPlan]:
        """Returns the plan of each layer that spares the most work under a budget in bytes."""
        shape = len(self._choices), self._num_levels
        work = [[plan.work * self._num_runs[fqn] for plan in plans] for fqn, plans in self._choices.items()]
        one_each = np.kron(np.eye(shape[0]), np.ones(shape[1]))
        matrix = np.concatenate([-self._rows / budget, -one_each])
        least = np.concatenate([self._peaks / budget - 1, -np.ones(shape[0])])
        found = _minimize_binary(-np.array(work).ravel(), matrix, least)
        taken = np.zeros(shape) if found is None else np.round(found).reshape(shape)
        return {
            fqn: next((plans[number] for number in np.flatnonzero(row)), self._in_full[fqn])
            for (fqn, plans), row in zip(self._choices.items(), taken, strict=True)
        }

    def peak(self, plans: Mapping[str, LayerPlan]) -> int:
        """Returns the peak that is expected with these plans, in bytes."""
        taken = [[plan.level == plans[fqn].level for plan in choices] for fqn, choices in self._choices.items()]
        return int((self._peaks + self._rows @ np.array(taken, dtype=float).ravel()).max())

    def _constraints(self, intervals: Sequence[Interval]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of choices in intervals, of shape ``(constraints, choices)``, and the peaks without."""
        peaks: dict[bytes, tuple[np.ndarray, int]] = {}  # intervals with equal bytes are one constraint
        now = np.zeros((len(self._choices), self._num_levels))
        in_flight = set()
        for kind, run, peak in intervals:
            row = now
            if run is not None:
                number, kept = self._number_of[run.fqn], self._bytes(run)
                if kind == "leave":
                    in_flight.add(run)
                    now[number] += kept
                elif kind == "restore" and run in in_flight:
                    in_flight.remove(run)
                    now[number] -= kept
                row = now.copy()
                if kind == "enter":  # of a choice that keeps everything this is measured
                    more = max(0, run.bytes_before + run.forward_bytes - peak)
                    row[number] += np.where(np.arange(self._num_levels) < self._num_levels - 1, kept, more)
                elif kind == "restore":  # results that autograd does not save are released as the layer is repeated
                    row[number] += self._bytes(run, unsaved=True)
            key = row.tobytes()
            peaks[key] = row.ravel().copy(), max(peak, peaks[key][1] if key in peaks else 0)
        rows, highest = zip(*peaks.values(), strict=True)
        return np.array(rows), np.array(highest, dtype=float)

    def _bytes(self, run: ProfiledRun, *, unsaved: bool = False) -> np.ndarray:
        return np.array([plan.bytes_of(run.measured, unsaved=unsaved) for plan in self._choices[run.fqn]], dtype=float)


def _minimize_binary(cost: np.ndarray, matrix: np.ndarray, least: np.ndarray) -> np.ndarray | None:
    """Returns the binary vector ``x`` of least ``cost @ x`` with ``matrix @ x >= least``; None if none was found."""
    from scipy.optimize import LinearConstraint, milp  # a quarter of a second, for runs with a budget alone

    found = milp(
        cost / (float(np.abs(cost).max()) or 1.0),
        constraints=LinearConstraint(matrix, lb=least),
        integrality=np.ones(len(cost)),
        bounds=(0, 1),
        # The presolve of some versions prints a line of its code for each solution.
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP, "presolve": False},
    )
    return None if found.x is None else np.array(found.x)
