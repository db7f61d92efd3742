"""What a run hears that is resumed with other replicas, and whose epochs have another number of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# Attributes of torch's schedulers that are numbers of steps.
_LENGTHS = ("total_steps", "total_iters", "T_max")


@dataclass(frozen=True)
class SavedEpochs:
    """What a checkpoint says of the epochs of its run."""

    replicas: int = 0  # of that run; 0 if no run is resumed
    batches: int = 0  # of each replica in an epoch; 0 if it has ended none
    schedules: tuple[str, ...] = ()  # schedules of a fixed length

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], replicas: int) -> SavedEpochs:
        """Read them from the checkpoint of a run on so many replicas."""
        schedules = []
        for state in checkpoint.get("lr_schedulers", ()):
            name = next((name for name in _LENGTHS if isinstance(state, Mapping) and state.get(name)), None)
            if name is not None:
                schedules.append(
                    f"the learning-rate schedule keeps {name}={state[name]} of the saved run, of which it has done"
                    f" {state.get('last_epoch', 0)}"
                )
        return cls(replicas, _batches_of_epoch(checkpoint), tuple(schedules))

    def changes_to(self, replicas: int, batches: float) -> str:
        """Return what changes with the number of replicas; "" if no number of steps does.

        Args:
            replicas: Of this run.
            batches: Of each replica in its epochs; infinite if that is unknown.
        """
        if self.replicas in (0, replicas) or self.batches == batches:
            return ""
        ratio = Fraction(self.replicas, replicas)
        if self.batches and math.isfinite(batches):
            epochs = f"an epoch has {batches} batches instead of {self.batches}"
        elif self.batches:
            epochs = f"an epoch had {self.batches} batches; with the same batch_size it has about"
            epochs += f" {math.ceil(self.batches * ratio)} now"
        elif math.isfinite(batches):
            epochs = (
                f"an epoch has {batches} batches; with the same batch_size it had about {math.ceil(batches / ratio)}"
            )
        else:
            epochs = "with the same batch_size an epoch has another number of batches"
        parts = [f"the number of replicas changes from {self.replicas} to {replicas}", epochs, *self.schedules]
        return "; ".join([*parts, f"as many steps as before take the batch_size of the saved run times {ratio}"])


def _batches_of_epoch(checkpoint: Mapping[str, Any]) -> int:
    """Batches of an epoch of the saved run; 0 if it has ended none."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    if not progress.get("is_last_batch"):
        return 0
    return int(progress["current"]["ready"])
