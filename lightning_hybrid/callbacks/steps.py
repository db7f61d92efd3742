"""The steps of a run as the Trainer's loggers count them: a batch or accumulated ones, whatever optimizers step in it.

`Trainer.global_step` counts the steps of optimizers, of which a batch has several under manual optimization.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Step(NamedTuple):
    """The step of the present batch; the same in `on_train_batch_start` and in `on_train_batch_end`."""

    number: int  # counted from 1
    begins: bool  # whether this is its first batch
    ends: bool  # whether this is its last batch
    is_logged: bool  # whether the Trainer logs it; the same on all ranks

    @property
    def done(self) -> int:
        """Number of steps that have ended with the present batch."""
        return self.number - (not self.ends)


def step_of(trainer: Any) -> Step:
    """Return the step of the present batch."""
    number, every = steps_done(trainer) + 1, trainer.log_every_n_steps
    return Step(
        number=number,
        begins=trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0,
        ends=not trainer.fit_loop._should_accumulate(),
        # As Lightning's `should_update_logs`, which also holds on a rank that is about to stop: there monitors would
        # wait for numbers of ranks that go on.
        is_logged=every > 0 and number % every == 0,
    )


def steps_done(trainer: Any) -> int:
    """Return the number of steps that had ended before the present batch, or at the end of a run."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
