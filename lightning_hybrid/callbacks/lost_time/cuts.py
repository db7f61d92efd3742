"""The pipeline cuts that a run has chosen by its measured steps, for its next epoch and for runs that resume it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_hybrid.callbacks.lost_time.steps import MeasuredSteps
from lightning_hybrid.callbacks.slow_links import GradientCompression
from lightning_hybrid.soft_failures import only_informs


class RebalancedCuts:
    """Cuts that are predicted to save more of a step than the noise of measurements."""

    def __init__(self) -> None:
        self._used: dict[str, Any] = {}  # by this run, or chosen by the one that it resumes
        self._proposed: dict[str, Any] = {}

    @property
    def pending(self) -> list[str] | None:
        """The cuts that the next epoch begins with; None if the stages stay."""
        return self._proposed.get("pipeline_cuts")

    @property
    def widths(self) -> list[int] | None:
        """The ranks of each stage for which the cuts were chosen; None if each has one."""
        return self.state_dict().get("stage_widths")

    @staticmethod
    def can_change_in_run(trainer: Any) -> bool:
        """Whether the stages can change at an epoch: not where replicas send gradients with error feedback."""
        return not any(isinstance(callback, GradientCompression) for callback in trainer.callbacks)

    def propose(self, strategy: Any, steps: MeasuredSteps, step: int) -> None:
        """Decide by the first rank's measured steps, up to ``step``, whether the stages change; collective."""
        plan = strategy.run.plan
        before = self.pending
        chosen: tuple[tuple[str, ...], str] | None = None
        with only_informs("the proposal of other pipeline_cuts"):
            if strategy.global_rank == 0 and (proposal := steps.proposal()) is not None:
                chosen = proposal.cuts, proposal.describe(steps.step_seconds)
        chosen = strategy.broadcast(chosen)
        self._proposed = {}
        if chosen is None or not strategy.run.is_pipelined:
            return
        cuts, description = chosen
        self._proposed = {
            "pipeline_cuts": list(cuts),
            "replaces": _as_list(strategy.options.pipeline_cuts),
            "num_stages": plan.num_stages,
            "stage_widths": list(plan.widths) or None,
            "parameters": _digest(plan.root),
        }
        if self.pending != before:
            at_epoch = "at the next epoch, and " if self.can_change_in_run(strategy.lightning_module.trainer) else ""
            rank_zero_info(
                f"step {step}: {description}; the stages change {at_epoch}in a run that resumes from a later checkpoint"
            )

    def applied(self) -> None:
        """Take note that the stages have the cuts."""
        self._used, self._proposed = self._proposed, {}

    def state_dict(self) -> dict[str, Any]:
        """The cuts as a checkpoint has them; empty without any."""
        return self._proposed or self._used

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the cuts of a checkpoint."""
        self._used, self._proposed = state, {}

    def cuts_of_start(self, module: nn.Module, cuts: Sequence[str] | None, num_stages: int) -> list[str] | None:
        """Return the cuts with which a run begins; None if it has chosen none, or these are for other stages.

        Those chosen by measurement replace the value that ``cuts``, an option of the strategy, had then.
        """
        self._used, self._proposed = self.state_dict(), {}
        chosen = self._used.get("pipeline_cuts")
        if chosen is None:
            return None
        own = {"replaces": _as_list(cuts), "num_stages": num_stages, "parameters": _digest(module)}
        names = {"replaces": "pipeline_cuts", "num_stages": "number of stages", "parameters": "names of parameters"}
        changed = [names[key] for key, value in own.items() if self._used.get(key) != value]
        if changed:
            rank_zero_info(
                f"pipeline_cuts={chosen}, chosen by measured steps, is not used: this run has another"
                f" {' and another '.join(changed)}"
            )
            return None
        if chosen != own["replaces"]:
            rank_zero_info(f"pipeline_cuts={chosen}, chosen by measured steps of the run that is resumed")
        return list(chosen)


def _as_list(cuts: Sequence[str] | None) -> list[str] | None:
    return None if cuts is None else list(cuts)


def _digest(module: nn.Module) -> int:
    """A checksum of the names of the parameters."""
    return zlib.crc32("\n".join(name for name, _ in module.named_parameters()).encode())
