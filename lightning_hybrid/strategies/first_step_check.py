"""The first optimizer step of a fit, checked against one process before any parameter changes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hybrid.pipeline.plain_runner import PlainRunner
from lightning_hybrid.pipeline.results.metric_sync import MetricSync
from lightning_hybrid.pipeline.runner import StepRunner
from lightning_hybrid.randomness.keyed_draws import GeneratorStates, KeyedRandomness
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.strategies.start.layout_table import activation_bytes
from lightning_hybrid.strategies.step_execution import SteppingStrategy
from lightning_hybrid.verify.copy_memory import shortage
from lightning_hybrid.verify.first_step_comparison import FirstStepError, compare_first_step, precision_of
from lightning_hybrid.verify.one_process.one_process_step import (
    Alone,
    Call,
    Given,
    StepAlone,
    no_communication,
    whole_on_first,
)

# Relative change of the weights for the noise floor: their last digits; autocast starts from weights in float32.
_PERTURBATION = {"64-true": 1e-15, "bf16-true": 2.0**-9, "16-true": 2.0**-11}
# Losses of the whole batch and of its parts that differ by more mix samples; rounding stays far below.
_MIXES = {"64-true": 1e-7, "32-true": 1e-4}


class VerifyingStrategy(SteppingStrategy):
    """Runs the first optimizer step in one process too, and goes on only if losses and gradients are the same."""

    def __init__(self, *, verify_first_step: bool, **options: Any) -> None:
        """Args: verify_first_step: whether to. options: as ``SteppingStrategy``."""
        super().__init__(**options)
        self._verify_first_step = verify_first_step
        self._alone: StepAlone | None = None
        self._metrics: MetricSync | None = None
        self._losses: list[float] | None = None  # while the first step is not verified: this rank's, by batch

    def begin_verification(self, module: pl.LightningModule) -> None:
        """The optimizer step that comes next is the first one.

        Raises:
            ValueError: The module steps its optimizers by itself.
        """
        if not self._verify_first_step:
            return
        if not module.automatic_optimization:
            raise ValueError(
                f"verify_first_step=True compares gradients before the optimizer steps, but {type(module).__name__}"
                " uses manual optimization, which steps by itself; set verify_first_step=False"
            )
        self._start_over()

    @property
    def _is_compiling(self) -> bool:
        # Compiled units draw other random numbers than the one process that they would be compared with.
        return super()._is_compiling and (self._losses is None or not self._compiled.draws)  # type: ignore[union-attr]

    @property
    def uncut_steps(self) -> frozenset[str]:
        """Names of steps of evaluation that every rank runs whole, so far."""
        if isinstance(self._runner, PlainRunner):
            return frozenset({"validation_step", "test_step", "predict_step"})
        return frozenset() if self._runner is None else frozenset(self._runner.uncut.names)

    @property
    def batch_shares(self) -> int:
        """Ranks that hold shards where they cannot hold stages, and run steps on shares of a replica's batch."""
        return self._wider_mesh.size("shares") if self._wider_mesh is not None else 1

    @property
    def shares_batches(self) -> bool:
        """Whether these ranks run training steps on shares of a batch; on all of it otherwise."""
        return isinstance(self._runner, PlainRunner) and self._runner.is_shared

    @property
    def steps_at_once(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches, so far."""
        return self._runner.steps_at_once if isinstance(self._runner, StepRunner) else frozenset()

    def _start_over(self) -> None:
        self._losses, self._alone = [], None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; before the first optimizer step, run it in one process as well.

        Raises:
            FirstStepError: One process cannot run it.
        """
        if self._losses is None:
            return super().training_step(*args, **kwargs)
        verified = self._in_one_process([*args, *kwargs.values()])
        output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if verified and loss is not None:
            self._losses.append(float(loss.detach()))
        else:  # a step without a loss changes nothing; the next one is the first
            self._start_over()
        return output

    def post_backward(self, closure_loss: Tensor) -> None:
        """After the backward that completes the gradients of the first step, compare them.

        Raises:
            FirstStepError: They are not those of one process.
        """
        super().post_backward(closure_loss)
        if self._losses and self._backward_syncs:
            self._compare()

    # -- one process --------------------------------------------------------------------------------------------------

    def _in_one_process(self, arguments: list[Any]) -> bool:
        """Run a batch of all replicas on the first rank; collective. Whether it gave a loss."""
        module = self.lightning_module
        assert module is not None and self._losses is not None
        self._check_room(module)
        batch, *rest = arguments
        given = self._gather(module, batch)
        failure, gave_loss = "", True
        pipeline = self.mesh.group("pp")
        with contextlib.ExitStack() as stack:
            if self._in_first_copy and self._parts is not None:
                stack.enter_context(self._parts.whole_inside())
            if self.data_rank == 0:
                stack.enter_context(whole_on_first(module, self._plan, pipeline))
            if self.global_rank == 0:
                try:
                    gave_loss = self._run_alone(module, given, rest)
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
        failure, gave_loss = self.broadcast((failure, gave_loss))
        if failure:
            raise FirstStepError(
                f"verify_first_step=True: the first step does not run in one process: {failure}. No parameter has"
                " changed; set verify_first_step=False to train without this check"
            )
        return bool(gave_loss)

    def _check_room(self, module: pl.LightningModule) -> None:
        first = self._plan.first.assignment if self._plan is not None and self._plan.first is not None else None
        activations = 0.0 if first is None else activation_bytes(first)
        missing = self.broadcast(shortage(module.parameters(), self.root_device, activations))
        if missing:
            raise FirstStepError(
                f"{missing}. No parameter has changed. Verify a smaller model of the same code (fewer layers, a smaller"
                " batch), or set verify_first_step=False"
            )

    def _gather(self, module: pl.LightningModule, batch: Any) -> list[Given]:
        """What all replicas were given, on the first rank."""
        count = 1 if self._runner is None else self._runner.count("training_step", batch)
        mine = Given(batch, count, GeneratorStates(self.root_device))
        data = self.mesh.group("data")
        if data.size() == 1 or self.mesh.rank_in("pp") > 0:
            return [mine]
        rows: list[Any] | None = [None] * data.size() if data.rank() == 0 else None
        sent = None if data.rank() == 0 else Given(move_data_to_device(batch, "cpu"), count, mine.generators)
        dist.gather_object(sent, rows, group=data, group_dst=0)
        others = (rows or [None])[1:]
        return [
            mine,
            *(
                Given(move_data_to_device(o.batch, self.root_device), o.count, o.generators.on(self.root_device))
                for o in others
                if o is not None
            ),
        ]

    def _run_alone(self, module: pl.LightningModule, given: list[Given], rest: list[Any]) -> bool:
        trainer = self._trainer
        if self._alone is None:
            keyed = None if self._runner is None else KeyedRandomness(self._seed or 0, self.root_device)
            self._alone = StepAlone(
                module,
                keyed=keyed,
                device=self.root_device,
                splitter=None if self._runner is None else self._runner.splitter,
                weight=self._weight,
                perturbation=_PERTURBATION.get(self._precision(module), 1e-7),
            )
        call = Call(
            step=module.training_step,
            rest=rest,
            number=trainer.fit_loop.epoch_loop.total_batch_idx,
            seed_factor=self.mesh_precision.loss_scale / trainer.accumulate_grad_batches,
            context=self._context("training_step"),
        )
        metrics = contextlib.nullcontext() if self._metrics is None else self._metrics.step()
        with no_communication(), metrics:
            return self._alone.run(call, given)

    def _precision(self, module: pl.LightningModule) -> str:
        return precision_of(self.mesh_precision.precision, list(module.parameters()))

    # -- the comparison -----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        module = self.lightning_module
        assert module is not None and self._losses is not None
        alone: Alone | None = None if self._alone is None else self._alone.result
        parameters = dict(module.named_parameters())
        overflow = alone is not None and not all(torch.isfinite(g).all() for g in alone.gradients.values())
        if self.mesh_precision.scaler is not None and self.broadcast(overflow):
            self._start_over()  # the loss scale is too large: this step will be skipped
            return
        stages = self._stages(parameters)
        trained = [p for p in parameters.values() if not is_absent(p)]
        clips = self._trainer.gradient_clip_val and self._trainer.gradient_clip_algorithm in (None, "norm")
        compare = partial(
            compare_first_step,
            losses=self._losses,
            parameters=parameters,
            stages=stages,
            norm=float(self.mesh_precision.grad_norm(trained)) if clips else None,
            replica=self.data_rank,
            mesh=self.mesh,
            device=self.root_device,
            precision=self._precision(module),
            parts=self._parts,
        )
        verdict = compare(alone)
        at_once = None if alone is None else alone.at_once
        if verdict.first is not None and self.broadcast(at_once is not None):
            # A mean over the tokens that labels leave is that of the whole batch.
            of_whole = compare(at_once)
            verdict, alone = (of_whole, None) if of_whole.first is None else (verdict, alone)
        self._losses = self._alone = None
        if verdict.first is not None:
            raise FirstStepError(
                f"{verdict.first}. No parameter has changed. `lightning-hybrid verify` shows more; another layout, such"
                " as pipeline_parallel_size=1, may be right; verify_first_step=False trains without this check"
            )
        noise = f"; {verdict.num_noise} of them are rounding noise" if verdict.num_noise else ""
        rank_zero_info(
            f"first step verified: loss and {verdict.num_gradients} gradients equal one process within"
            f" {verdict.within:.1g}{noise}"
        )
        if alone is not None:
            self._warn_of_mixing(alone, self._precision(module))

    def _stages(self, parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        plan = self._plan
        if plan is None or plan.first is None or plan.num_stages == 1:
            return {}
        return {name: plan.stages_of(name) for name in parameters}

    def _warn_of_mixing(self, alone: Alone, precision: str) -> None:
        if alone.untried:
            rank_zero_info(f"the whole batch was not tried at once: {alone.untried}")
        if alone.mixes is None:
            return
        whole, mean, count = alone.mixes
        if abs(whole - mean) > _MIXES.get(precision, 5e-2) * max(abs(whole), abs(mean)) + 1e-12:
            rank_zero_warn(
                f"the objective mixes samples: the loss of the whole batch is {whole:.6g}, the mean over its {count}"
                f" microbatches {mean:.6g}. Training minimises the latter, as gradient accumulation does; for a mean"
                " over what a mask leaves, pass microbatch_weight=function(microbatch) -> count"
            )
