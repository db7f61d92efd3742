"""Compiled layers under a budget: each keeps what its compiler saves, or is recomputed in full.

What a compiler saves inside of a layer cannot be chosen operation by operation, so there are two choices for a layer. A
batch is profiled in which the layers run uncompiled, as a mode cannot count what compiled code allocates, and are
recomputed in full: the intervals of the profile are those of a run at the floor, and the recomputation of a layer shows
the bytes that it saves. The layers that keep them are chosen by an integer program:

    maximize  sum work[l] * y[l]    subject to    peak[t] + sum bytes[t, l] * y[l] <= budget    for each interval t

``bytes[t, l]`` are those of all runs of the layer whose forward has ended and whose backward has not begun, and in a
forward what it takes more if it releases nothing: during its backward a layer has them in memory whatever is chosen.
Compiled code saves about as much as the same code uncompiled, or less: the partitioner of torch.compile takes the
minimum cut between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import flop_registry

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.budget.budgeted_layers import BudgetedLayers, BudgetReport, LayerPlan, recomputed_share
from lightning_hybrid.memory.budget.integer_program import minimize_binary
from lightning_hybrid.memory.budget.kept_results import Choice
from lightning_hybrid.memory.budget.layer_choices import Solution
from lightning_hybrid.memory.budget.step_profile import StepProfile
from lightning_hybrid.memory.selective_activation_checkpointing import WORK_PER_BYTE
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import storage_id

Forward = Callable[..., Any]
_SECONDS = 20.0
_GAP = 2e-3  # of the work, at which the search ends


class BudgetedCompiledLayers(BudgetedLayers):
    """Chooses which layers are recomputed in full, so that the bytes of this rank stay under a budget."""

    def choosing(self, forward: Forward, fqn: str, checkpointed: Callable[[Forward], Forward]) -> Forward:
        """Wrap the forward of a layer: it is recomputed unless it was chosen to keep what it saves.

        Args:
            forward: Of the layer; runs compiled.
            fqn: Name of the layer.
            checkpointed: Wraps a forward so that it is repeated in the backward.
        """
        recomputed = checkpointed(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            input_bytes = _storage_bytes(_tensors((args, kwargs)))
            if self._profile is not None:
                return self._profiled(forward, fqn, checkpointed, input_bytes)(*args, **kwargs)
            plan = self.plans.get(fqn)
            is_covered = plan is not None and self._has_seen(plan, input_bytes)
            return (forward if plan is not None and is_covered and plan.keeps_all else recomputed)(*args, **kwargs)

        return run

    def _profiled(
        self, forward: Forward, fqn: str, checkpointed: Callable[[Forward], Forward], input_bytes: int
    ) -> Forward:
        """Return the forward of a layer for one run of a batch that is profiled."""
        profile, work = self._profile, _ForwardWork()
        assert profile is not None
        has_run = False

        def marked(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                with work:
                    return forward(*args, **kwargs)
            profile.begin_recomputation(layer_run)
            before = profile.live.now
            out = forward(*args, **kwargs)
            # Autograd may save outputs, but they stay alive as inputs of other code in any case.
            inputs = {storage_id(tensor) for tensor in _tensors((args, kwargs))}
            outputs = [tensor for tensor in _tensors(out) if storage_id(tensor) not in inputs]
            layer_run.forward_bytes = profile.live.peak - before
            layer_run.saved_bytes = max(0, profile.live.now - before - _storage_bytes(outputs))
            profile.end_recomputation(layer_run)
            return out

        layer_run = profile.enter(fqn, input_bytes)
        layer_run.bytes_before = profile.live.now

        def run(*args: Any, **kwargs: Any) -> Any:
            with set_checkpoint_early_stop(False):  # at the end of the forward, what it saves is all that is left of it
                out = checkpointed(marked)(*args, **kwargs)
            layer_run.work = work.work
            profile.leave(layer_run)
            return out

        return run

    def _choose_from(self, profile: StepProfile) -> None:
        budget, lowest = self._budget(self._before), profile.peak
        self.least = lowest.peak
        if lowest.peak > budget:
            raise RecomputeError(
                self._floor_message(budget, Solution({}, lowest.peak, lowest)), entry="recompute-budget"
            )
        runs = list(profile.runs)
        layers = list(dict.fromkeys(run.fqn for run in runs))
        rows, peaks = _constraints(profile, layers)
        work = np.zeros(len(layers))
        for run in runs:
            work[layers.index(run.fqn)] += run.work
        found = minimize_binary(-work, -rows / budget, peaks / budget - 1, seconds=_SECONDS, gap=_GAP)
        keeps = np.zeros(len(layers)) if found is None else np.round(found)
        # A layer that was in no backward may save something in another batch.
        saves = {run.fqn for run in runs if run.saved_bytes is not None}
        for number, fqn in enumerate(layers):
            is_kept = bool(keeps[number]) and fqn in saves
            choice = Choice(None, 0.0) if is_kept else Choice(frozenset(), float(work[number]))
            self.plans.setdefault(fqn, LayerPlan()).choices = {None: choice}
        self._end_profile(profile)
        kept_share = {fqn: float(self.plans[fqn].keeps_all) for fqn in layers}
        peak = int((peaks + rows @ keeps).max())
        kept_bytes = sum(kept_share[run.fqn] * (run.saved_bytes or 0) for run in runs)
        share = recomputed_share(kept_bytes, sum(run.saved_bytes or 0 for run in runs))
        self.report = BudgetReport(budget, peak, lowest.peak, self._before, len(runs), kept_share, share)


def _constraints(profile: StepProfile, layers: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that layers would keep, of shape ``(constraints, layers)``, and the peaks without them."""
    peaks: dict[bytes, tuple[np.ndarray, int]] = {}  # intervals in which the same runs are in flight are one constraint
    now, in_flight = np.zeros(len(layers)), set()
    number_of = {fqn: number for number, fqn in enumerate(layers)}
    for kind, run, _, peak in profile.intervals:
        if run is not None and kind == "leave":
            in_flight.add(run)
            now[number_of[run.fqn]] += run.saved_bytes or 0
        elif run in in_flight and kind == "restore":
            in_flight.remove(run)
            now[number_of[run.fqn]] -= run.saved_bytes or 0
        row = now.copy()
        if run is not None and kind == "enter" and run.saved_bytes is not None:
            row[number_of[run.fqn]] += max(0, run.bytes_before + run.forward_bytes - peak)
        key = row.tobytes()
        peaks[key] = row, max(peak, peaks[key][1] if key in peaks else 0)
    rows, highest = zip(*peaks.values(), strict=True)
    return np.array(rows), np.array(highest, dtype=float)


class _ForwardWork(TorchDispatchMode):
    """Counts the work of operations, in floating-point operations of a matrix product.

    Attributes:
        work: So far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        moved = [*_tensors((args, kwargs)), *_tensors(out)]
        self.work += sum(tensor.nbytes * WORK_PER_BYTE.get(tensor.device.type, 100.0) for tensor in moved)
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.work += count(*args, **kwargs, out_val=out)
        return out


def _tensors(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if type(leaf) in (Tensor, torch.nn.Parameter))
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors of any shape, each once."""
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
