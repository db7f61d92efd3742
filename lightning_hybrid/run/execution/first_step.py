"""The first optimizer step of a fit, checked against one process before any parameter changes."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.errors import FirstStepError
from lightning_hybrid.patching import around
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.build import OwnedByRun, RunOwner
from lightning_hybrid.run.execution.steps import StepPolicy
from lightning_hybrid.run.optimizer_states import is_in_first_copy
from lightning_hybrid.step.standins.tensors import drop, fill, is_absent
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.text import contrasted, counted

if TYPE_CHECKING:
    from lightning_hybrid.verify.first_step import OneProcessResult, OneProcessStep, ReplicaInput, Verdict
    from lightning_hybrid.verify.steps import Mixing


def printed_once(error: FirstStepError, rank: int) -> FirstStepError:
    """Let an error, where it ends the process, print its message alone, and on the first rank only.

    All ranks raise the same one, and its tracebacks show no code of the user.
    """

    def show(original: Callable[..., None], kind: type[BaseException], other: BaseException, trace: Any) -> None:
        if not isinstance(other, FirstStepError):
            original(kind, other, trace)
        elif rank == 0:
            print(f"{kind.__name__}: {other}", file=sys.stderr)

    undo = around(sys, "excepthook", show, reason="an error of all ranks is printed once")
    weakref.finalize(error, undo)  # the user's code may catch it
    return error


class FirstStepCheck(OwnedByRun, StepPolicy):
    """Runs the first optimizer step in one process too, and raises unless losses and gradients match.

    Attributes:
        is_pending: Whether the next step is compared with one process.
    """

    def __init__(self, owner: RunOwner) -> None:
        super().__init__(owner)
        self._reference: OneProcessStep | None = None
        self._has_loss = False  # of the latest batch, in one process
        self._full = True  # whether full batches are run at once, not their microbatches
        self._losses: list[float] = []  # of this rank, by batch
        self.is_pending = False

    def begin(self) -> None:
        """Compare the next optimizer step.

        Raises:
            ValueError: The module steps its optimizers by itself.
        """
        module = self.setting.module
        if not module.automatic_optimization:
            raise ValueError(
                f"verify_first_step=True compares gradients before the optimizer steps, but {type(module).__name__}"
                " uses manual optimization, which steps inside training_step; set verify_first_step=False"
            )
        self._start_over()

    def _start_over(self) -> None:
        self.is_pending, self._losses, self._reference = True, [], None

    def before_batch(self, args: Sequence[Any]) -> None:
        """Run a training step before the first optimizer step in one process as well."""
        if not self.is_pending:
            return
        from lightning_hybrid.strategies.logs.phases import phase

        with phase("verify_first_step=True: running the step in one process"):
            self._has_loss = self._run_reference([*args])

    def after_batch(self, output: Any) -> None:
        """Keep the loss of a training step before the first optimizer step."""
        if not self.is_pending:
            return
        loss = find_loss(output)
        if self._has_loss and loss is not None:
            self._losses.append(float(loss.detach()))
        else:  # a step without a loss changes nothing; the next one is the first
            self._start_over()

    def after_backward(self, *, is_complete: bool) -> None:
        """Compare the gradients of the first step once they are averaged."""
        if self._losses and is_complete:
            self._compare()

    # -- one process --------------------------------------------------------------------------------------------------

    def _run_reference(self, arguments: list[Any]) -> bool:
        """Run the batches of all replicas on the first rank; return whether there is a loss; collective."""
        batch, *rest = arguments
        self._check_memory(batch)
        replica_inputs = self._gather(batch)
        failure, gave_loss = "", True
        world, run = self.setting.world, self.run
        with contextlib.ExitStack() as stack:
            if is_in_first_copy(world) and run.parts:
                stack.enter_context(run.parts.summon_full_parameters())
            if world.data_rank == 0:
                stack.enter_context(self._parameters_of_stages())
            if world.mesh.rank == 0:
                try:
                    gave_loss = self._run_one_process(replica_inputs, rest)
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
        failure, gave_loss = world.broadcast((failure, gave_loss))
        if failure:
            refusal = FirstStepError(
                f"verify_first_step=True: the first step does not run in one process: {failure}. No parameter has"
                " changed; set verify_first_step=False to train without this check",
                entry="first-step-fails",
            )
            raise printed_once(refusal, self.setting.world.mesh.rank)
        return bool(gave_loss)

    @contextlib.contextmanager
    def _parameters_of_stages(self) -> Iterator[None]:
        """Context in which the first rank of a pipeline has all parameters; collective over its ranks."""
        plan, group = self.run.plan, self.setting.world.mesh.group("pp")
        if plan is None or plan.first is None:
            yield
            return
        filled = []
        for name, parameter in self.setting.module.named_parameters():
            owner = plan.ranks_of(name)[0]
            if owner > 0 and plan.rank == owner:
                dist.send(on_group_device(parameter.detach().contiguous(), group), group=group, group_dst=0)
            elif owner > 0 and plan.rank == 0:
                content = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                dist.recv(content, group=group, group_src=owner)
                fill(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))
                filled.append(parameter)
        try:
            yield
        finally:
            for parameter in filled:
                drop(parameter)

    def _check_memory(self, batch: Any) -> None:
        from lightning_hybrid.memory.free import memory_shortage

        setting = self.setting
        # The values of one microbatch, without those inside of units; those of all where a full batch fits.
        recorded = self.run.recorded
        activations = 0 if recorded is None else sum(value.nbytes for value in recorded.assignment.graph.values)
        shortage = partial(memory_shortage, list(setting.module.parameters()), setting.device)
        needed = activations * self.run.count(batch), activations
        too_large, missing = setting.world.broadcast(tuple(map(shortage, needed)))
        self._full = not too_large
        if too_large and not missing:
            rank_zero_info(f"the first step is verified one microbatch after the other: {too_large}")
        if missing:
            refusal = FirstStepError(
                f"{missing}. No parameter has changed. Verify a smaller model of the same code (fewer layers, a smaller"
                " batch), or set verify_first_step=False",
                entry="first-step-memory",
            )
            raise printed_once(refusal, self.setting.world.mesh.rank)

    def _gather(self, batch: Any) -> list[ReplicaInput]:
        from lightning_hybrid.verify.first_step import ReplicaInput

        mesh, device, count = self.setting.world.mesh, self.setting.device, self.run.count(batch)
        local = ReplicaInput(batch, count, GeneratorStates(device))
        data = mesh.group("data")
        if data.size() == 1 or mesh.rank_in("pp") > 0:
            return [local]
        rows: list[Any] | None = [None] * data.size() if data.rank() == 0 else None
        sent = None if data.rank() == 0 else ReplicaInput(move_data_to_device(batch, "cpu"), count, local.generators)
        dist.gather_object(sent, rows, group=data, group_dst=0)
        return [local] + [
            ReplicaInput(move_data_to_device(each.batch, device), each.count, each.generators.on(device))
            for each in (rows or [])[1:]
        ]

    def _run_one_process(self, replica_inputs: list[ReplicaInput], rest: list[Any]) -> bool:
        from lightning_hybrid.verify.first_step import OneProcessStep, StepCall, no_communication

        setting, run = self.setting, self.run
        trainer, module = setting.trainer, setting.module
        if self._reference is None:
            keyed = None if run.runner is None else KeyedRandomness(setting.seed, setting.device)
            self._reference = OneProcessStep(
                module,
                keyed=keyed,
                device=setting.device,
                splitter=None if run.runner is None else run.runner.splitter,
                weight=setting.options.microbatch_weight,
                precision=self._precision,
                runs_full_batch=self._full,
            )
        call = StepCall(
            step=module.training_step,
            rest=rest,
            number=trainer.fit_loop.epoch_loop.total_batch_idx,
            seed_factor=setting.mesh_precision.loss_scale / trainer.accumulate_grad_batches,
            context=run.context("training_step"),
        )
        metrics = contextlib.nullcontext() if run.metrics is None else run.metrics.step()
        with no_communication(), metrics:
            return self._reference.run(call, replica_inputs)

    @property
    def _precision(self) -> str:
        from lightning_hybrid.verify.first_step import precision_of

        setting = self.setting
        return precision_of(setting.mesh_precision.precision, list(setting.module.parameters()))

    # -- the comparison -----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        from lightning_hybrid.verify.first_step import compare_first_step

        setting, world = self.setting, self.setting.world
        reference: OneProcessResult | None = None if self._reference is None else self._reference.result
        parameters = dict(setting.module.named_parameters())
        overflow = reference is not None and not all(torch.isfinite(g).all() for g in reference.gradients.values())
        if setting.mesh_precision.scaler is not None and world.broadcast(overflow):
            self._start_over()  # the loss scale is too large: this step will be skipped
            return
        stages = self._stages(parameters)
        trained = [p for p in parameters.values() if not is_absent(p)]
        trainer = setting.trainer
        clips = trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm")
        compare = partial(
            compare_first_step,
            losses=self._losses,
            parameters=parameters,
            stages=stages,
            norm=float(setting.mesh_precision.grad_norm(trained)) if clips else None,
            replica=world.data_rank,
            mesh=world.mesh,
            device=setting.device,
            precision=self._precision,
            parts=self.run.parts,
        )
        verdict = compare(reference)
        split = None if reference is None else reference.of_microbatches
        if verdict.first and world.broadcast(split is not None):
            of_microbatches = compare(split)  # an objective that mixes samples
            verdict = verdict if of_microbatches.first else of_microbatches
        self.is_pending, self._losses, self._reference = False, [], None
        if verdict.first:
            refusal = FirstStepError(
                f"{verdict.first}. No parameter has changed. `lightning-hybrid verify` compares other"
                " layouts with one process; verify_first_step=False trains without this check",
                entry="first-step-differs",
            )
            raise printed_once(refusal, self.setting.world.mesh.rank)
        rank_zero_info(describe_verdict(verdict, self._precision))
        if reference is not None and reference.mixing is not None:
            self._warn_of_mixing(reference.mixing)

    def _stages(self, parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        plan = self.run.plan
        if plan is None or plan.first is None or plan.num_stages == 1:
            return {}
        return {name: plan.stages_of(name) for name in parameters}

    def _warn_of_mixing(self, mixing: Mixing) -> None:
        module = self.setting.module
        text = describe_mixing_of_step(module, mixing, self.setting.world.mesh.layout.data_parallel_size)
        code = unwrap(type(module).training_step).__code__  # the warning names the user's step
        warnings.warn_explicit(text, UserWarning, Path(code.co_filename).name, code.co_firstlineno)


def describe_verdict(verdict: Verdict, precision: str) -> str:
    """The line about a first step that matches; ``precision`` is Lightning's name of it."""
    weak = ""
    if verdict.num_noise:
        weak = f"; {verdict.num_noise} of the {verdict.num_gradients} change by more than 1 % through rounding alone,"
        weak += " so their check is weak"
        weak += '; use precision="32-true" for a sharp one' * ("16" in precision)
    return (
        f"first step verified: loss and {verdict.num_gradients} gradients match one process within"
        f" {verdict.within:.1g}{weak}"
    )


def describe_mixing_of_step(module: nn.Module, mixing: Mixing, replicas: int) -> str:
    """The warning about a full batch that is not the mean over its microbatches."""
    from lightning_hybrid.run.execution.fit import batch_norms_in_training

    layers = len(batch_norms_in_training(module))
    advice = " For a mean over the entries that a mask selects, pass microbatch_weight=function(microbatch) -> count"
    if layers:
        advice = f" It has {counted(layers, 'BatchNorm layer')}: fewer microbatches give them more samples"
        advice += ", and Trainer(sync_batchnorm=True) adds those of the other replicas" * (replicas > 1)
    full, mean = contrasted(mixing.full, mixing.mean)
    return (
        f"the objective mixes samples: {mixing.what} of the full batch is {full}, the mean over its"
        f" {mixing.count} microbatches {mean}. Training minimises the latter, as gradient accumulation"
        f" does.{advice}"
    )
