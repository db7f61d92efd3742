"""The contexts around steps of the user: precision, loggers, the world visible to user code, and notes on errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError, StepError, add_error_note
from lightning_hybrid.layout import SIZE_OPTIONS, ParallelLayout
from lightning_hybrid.strategies.logs.reduction import captured_calls
from lightning_hybrid.strategies.user_code.hooks import current_hook
from lightning_hybrid.strategies.world.evaluation import forbid_unmatched_collectives
from lightning_hybrid.strategies.world.ranks import RankWorld

Context = Callable[[], AbstractContextManager[Any]]


class StepContexts:
    """Makes the contexts around the steps of one module."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, world: RankWorld, precision: Precision) -> None:
        self._trainer, self._module, self._world, self._precision = trainer, module, world, precision

    def of(self, name: str, *, delays_calls: bool, around_layers: Sequence[Context] = ()) -> Context:
        """Return the factory of the context around one run of the step ``name``.

        Where a step runs several times, its calls of loggers and its checkpoints wait for its end (``delays_calls``).
        ``around_layers`` are entered around a training step, the innermost first: they replace the forwards of layers.
        """
        short = {"training_step": "train", "validation_step": "val"}.get(name, name.removesuffix("_step"))
        precision: Context = getattr(self._precision, f"{short}_step_context")
        layers = around_layers if name == "training_step" else ()
        calls: Callable[[Any], AbstractContextManager[Any]] = captured_calls if delays_calls else nullcontext

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with self._world.step():
                try:
                    inner = self._among_replicas(name)
                    with self.advice(), self._world.as_user(), precision(), calls(self._module), ExitStack() as stack:
                        for around in layers:
                            stack.enter_context(around())
                        with inner:
                            yield
                except Exception as error:
                    if name == "training_step":
                        add_error_note(error, f"in training_step {self._when()}")
                    raise

        return context

    def _when(self) -> str:
        batch = self._trainer.fit_loop.epoch_loop.batch_idx
        return f"of batch {batch} (step {self._trainer.global_step})" if batch >= 0 else "when it was recorded"

    @contextlib.contextmanager
    def advice(self) -> Iterator[None]:
        """Let errors about steps name the sizes to change in this layout."""
        try:
            yield
        except (StepError, ControlFlowError) as error:
            _advise(error, self._world.layout)
            raise

    @contextlib.contextmanager
    def training_step_hook(self) -> Iterator[None]:
        """Enter the context of a training step that is inspected outside of Lightning's loop."""
        with self.advice(), self._world.as_user(), current_hook(self._module, "training_step"):
            yield

    def _among_replicas(self, name: str) -> AbstractContextManager[Any]:
        """Raise on collectives over replicas in an evaluation batch that some replicas do not have."""
        if name not in ("validation_step", "test_step") or self._world.layout.data_parallel_size == 1:
            return nullcontext()
        return forbid_unmatched_collectives(self._trainer, self._world.mesh, name)


def _advise(error: Exception, layout: ParallelLayout) -> None:
    """Replace an error's advice to have no stages where there are none: the step is recorded for the other sizes."""
    changes = [f"{SIZE_OPTIONS[axis]}=1" for axis in ("tp", "cp", "ep") if layout.by_axis[axis] > 1]
    if layout.pipeline_parallel_size == 1 and changes:
        error.args = (str(error).replace(WITHOUT_STAGES, f"set {' and '.join(changes)}"), *error.args[1:])
