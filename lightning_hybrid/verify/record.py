"""The record of a run on one rank: losses, metrics, parameters and failures, picklable for another process."""

from __future__ import annotations

import contextlib
import dis
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.mesh import is_lost_connection
from lightning_hybrid.optimizers.replacement import replace_step
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.recording import find_loss

# Relative perturbation that changes the last digits of numbers, by precision.
_PERTURBATION = {"64-true": 1e-15, "32-true": 1e-7, "16-true": 2.0**-11, "bf16-true": 2.0**-9}
_RAISES_NO_REFUSALS = ("lightning_hybrid.verify", "lightning_hybrid.shared_memory")


@dataclass
class StepRecord:
    """State recorded after one training batch."""

    loss: float | None  # loss of this rank's replica; None if the step returned none
    metrics: dict[str, float]  # ``trainer.callback_metrics``
    learning_rates: list[float]  # one per parameter group
    grad_norms: dict[str, float]  # norm of the full gradient of each parameter that this rank stepped, by FQN
    weights: dict[str, Tensor]  # full copies of the parameters that this rank has, by FQN


@dataclass
class Failure:
    """The exception that ended a run early."""

    message: str  # type and text of the exception
    refused: bool  # whether this package raised it on purpose, before any parameter changed
    where: str  # file and line that raised
    lost: bool = False  # whether it only reports that the connection to another rank was lost
    unchanged: bool = False  # whether no parameter of this rank had changed
    traceback: str = ""  # as Python prints it; empty for a refusal
    resuming: bool = False  # whether the run was over, and one that goes on from its checkpoint failed


@dataclass
class RunRecord:
    """One run, as recorded by one rank."""

    replica: int = 0  # index of the replica whose batches this rank received
    start: dict[str, Tensor] = field(default_factory=dict)  # parameters of this rank before the first step
    perturbed: dict[str, Tensor] = field(default_factory=dict)  # the same with the perturbation added, if there is one
    steps: list[StepRecord] = field(default_factory=list)  # one entry per training batch
    # ``trainer.callback_metrics`` after each validation
    validations: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # ``trainer.callback_metrics`` after the run
    # ``trainer.callback_metrics`` after a test, if the module and its data have one
    tests: dict[str, float] = field(default_factory=dict)
    # tensors and numbers that a prediction returned, by pytree path, if there is one
    predictions: dict[str, Tensor] = field(default_factory=dict)
    coarse: set[str] = field(default_factory=set)  # names of metrics that are kept in less than float64
    weights: dict[str, Tensor] = field(default_factory=dict)  # all parameters after the run
    buffers: dict[str, Tensor] = field(default_factory=dict)  # all buffers after the run
    # values of a checkpoint that was saved after the fit, by what they are; on the first rank
    checkpoint: dict[str, Tensor] = field(default_factory=dict)
    resumed: dict[str, Tensor] = field(default_factory=dict)  # all parameters after one step more from this checkpoint
    trained: list[str] = field(default_factory=list)  # FQNs of the parameters that require gradients
    # the run's warnings that a logged number is not that of the batch, by name
    declared: dict[str, str] = field(default_factory=dict)
    unpartitioned_steps: frozenset[str] = frozenset()  # names of evaluation steps that each rank ran unpartitioned
    unsplit_steps: frozenset[str] = frozenset()  # names of steps whose batches were one microbatch each
    # the first training batch that was one microbatch, as all after it: earlier ones showed no mixing of samples
    unsplit_from: int | None = None
    shares: int = 1  # number of ranks that hold shards instead of stages
    shared: set[int] = field(default_factory=set)  # the training batches that they ran on shares of the batch
    # the first training batch that ran in stages, and the first after them that did not, if the layout has changed
    pipelined: tuple[int, int | None] = (0, None)
    # replicas, microbatches of each, and samples of a microbatch (0 if unknown) of the training batch with the most
    # microbatches; in a reference
    batch: tuple[int, int, int] = (0, 0, 0)
    step_numbers: set[str] = field(default_factory=set)  # names under which steps log plain numbers, in a reference
    has_batch_norm: bool = False  # whether the module has BatchNorm layers, in a reference
    # whether steps draw numbers that are not of samples, such as dropout of weights; in a reference
    has_undivided_draws: bool = False
    # the first step that is not the mean of that on its microbatches, in a reference that runs these
    mixing: Any = None
    # for each step the loss of each replica; in a reference of several
    replica_losses: list[list[float]] = field(default_factory=list)
    # the buffers of each replica; in a reference of several
    replica_buffers: list[dict[str, Tensor]] = field(default_factory=list)
    # the predictions of each replica; in a reference
    replica_predictions: list[dict[str, Tensor]] = field(default_factory=list)
    failure: Failure | None = None  # the exception that ended the run, if one did


class RunRecorder:
    """Callback hooks that fill an ``RunRecord``; a mixin for the Callback class of the module's Lightning."""

    def __init__(self, perturbation: float) -> None:
        """Take ``perturbation`` (relative size of the noise that is added to the weights before the first step)."""
        self.observed = RunRecord()
        self._perturbation = perturbation
        self._grad_norms: dict[str, float] = {}
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the initial weights, perturb them, and wrap the optimizers' steps."""
        self.observed.start = local_copies(pl_module.named_parameters(), trainer)
        self.observed.trained = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        self.observed.replica = getattr(trainer.strategy, "data_rank", trainer.global_rank)
        if self._perturbation:
            perturb(pl_module, self._perturbation)
            self.observed.perturbed = local_copies(pl_module.named_parameters(), trainer)
        for optimizer in trainer.optimizers:
            self._undo.callback(_after_steps(optimizer, partial(self._record_norms, trainer, pl_module)))

    def _record_norms(self, trainer: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and not is_absent(parameter) and not is_absent(parameter.grad):
                gradient = parameter.grad.detach()
                if (shards := _local_shards_of(trainer)) is not None:
                    gradient = shards.full_state_of(parameter, gradient)
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                norm = torch.linalg.vector_norm(gradient.double() if gradient.is_floating_point() else gradient)
                self._grad_norms[names.get(id(parameter), "a parameter outside of the module")] = float(norm)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record loss, metrics, learning rates and weights after the step."""
        run = getattr(trainer.strategy, "run", None)
        if run is not None and run.shared_last_batch:
            self.observed.shared.add(len(self.observed.steps))
        if run is not None and self.observed.unsplit_from is None and "training_step" in run.unsplit_step_names:
            self.observed.unsplit_from = len(self.observed.steps)
        loss = find_loss(outputs)
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.observed.steps.append(
            StepRecord(
                loss=float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 and not is_absent(loss) else None,
                metrics=self._numbers(trainer.callback_metrics),
                learning_rates=rates,
                grad_norms=self._grad_norms,
                weights=local_copies(pl_module.named_parameters(), trainer),
            )
        )
        self._grad_norms = {}

    def teardown(self, *_: Any, **__: Any) -> None:
        """Restore the optimizers' steps."""
        self._undo.close()

    on_exception = teardown

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics that validation logged."""
        self.observed.validations.append(self._numbers(trainer.callback_metrics))

    def finish(self, trainer: Any, module: nn.Module) -> RunRecord:
        """Record metrics, parameters and buffers after the run."""
        self.observed.metrics = self._numbers(trainer.callback_metrics)
        self.observed.weights = local_copies(module.named_parameters(), trainer)
        self.observed.buffers = local_copies(module.named_buffers(), trainer)
        self._record_step_modes(trainer)
        return self.observed

    def record_test(self, trainer: Any) -> None:
        """Record the metrics that a test logged."""
        self.observed.tests = self._numbers(trainer.callback_metrics)
        self._record_step_modes(trainer)

    def record_predictions(self, predictions: Any, trainer: Any) -> None:
        """Record the results of a prediction."""
        self._record_step_modes(trainer)
        num_loaders = trainer.predict_loop.num_dataloaders
        self.observed.predictions = prediction_leaves([predictions] if num_loaders == 1 else predictions)

    def _record_step_modes(self, trainer: Any) -> None:
        run = getattr(trainer.strategy, "run", None)
        if run is None:  # another strategy, whose steps are those of one process
            return
        self.observed.unpartitioned_steps |= run.unpartitioned_steps
        self.observed.unsplit_steps |= run.unsplit_step_names - {"training_step"}
        self.observed.declared |= run.declared
        self.observed.shares = max(self.observed.shares, run.batch_shares)
        self.observed.pipelined = trainer.strategy.pipelined_batches

    def _numbers(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        self.observed.coarse.update(name for name, value in metrics.items() if value.dtype != torch.float64)
        return {name: float(value) for name, value in metrics.items()}


def local_copies(tensors: Iterable[tuple[str, Tensor]], trainer: Any = None) -> dict[str, Tensor]:
    """CPU copies, of the full shapes, of the tensors whose content is on this rank, by FQN.

    Shards of the trainer's strategy are all-gathered, which is collective.
    """
    shards = _local_shards_of(trainer)
    return {
        name: (tensor if shards is None else shards.unshard(name, tensor)).detach().to("cpu", copy=True)
        for name, tensor in tensors
        if not is_absent(tensor) and not tensor.is_meta
    }


def prediction_leaves(loaders: list[Any]) -> dict[str, Tensor]:
    """Tensors of any shape and numbers of predictions, by pytree path: loader, batch, and path in the step's output."""
    leaves = torch.utils._pytree.tree_flatten_with_path(loaders)[0]
    return {
        torch.utils._pytree.keystr(path): torch.as_tensor(leaf).detach().to("cpu", copy=True)
        for path, leaf in leaves
        if isinstance(leaf, Tensor | float | int)
    }


def _local_shards_of(trainer: Any) -> Any:
    return getattr(getattr(getattr(trainer, "strategy", None), "run", None), "parts", None)


def describe_failure(error: Exception, *, steps_done: int) -> Failure:
    """Describe an exception; it is a refusal if a ``raise`` of this package raised it and nothing has changed yet."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_raised_here = last is not None and _raised_here(last)
    unchanged = steps_done == 0
    refused = is_raised_here and unchanged and not isinstance(error, AssertionError)
    where = "" if last is None else f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    shown = "" if refused else "".join(traceback.format_exception(error))
    return Failure(f"{type(error).__name__}: {error}", refused, where, is_lost_connection(error), unchanged, shown)


def _raised_here(frame: TracebackType) -> bool:
    module = str(frame.tb_frame.f_globals.get("__name__", ""))
    # A lost connection to another rank, or a wait for it that timed out, is no refusal.
    if not module.startswith("lightning_hybrid.") or module.startswith(_RAISES_NO_REFUSALS):
        return False
    # An operation of torch that fails in code of this package leaves no frame of its own, but it is no refusal.
    code = frame.tb_frame.f_code.co_code
    return dis.opname[code[frame.tb_lasti]] == "RAISE_VARARGS"


def _after_steps(
    optimizer: torch.optim.Optimizer, callback: Callable[[torch.optim.Optimizer], None]
) -> Callable[[], None]:
    """Call ``callback`` after each step; no hook, since wrappers that skip torch's ``__init__`` have no hooks."""
    original = optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        callback(self)
        return result

    return replace_step(optimizer, step, None, reason="records each step")


def perturbation(precision: str) -> float:
    """The relative perturbation of the initial weights for the noise floor of a run: the last digits of operations."""
    return _PERTURBATION.get(precision.replace("mixed", "true"), 2.0**-9)


def perturbation_of_weights(precision: str) -> float:
    """The relative perturbation of the weights for one step: their last digits; float32 under mixed precision."""
    return _PERTURBATION.get(precision, 1e-7)


def perturb(module: nn.Module, size: float) -> None:
    """Multiply every weight elementwise by 1 + ``size`` * standard normal noise, in place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                factor = (1 + size * noise).to(parameter.device)
                parameter.copy_((parameter.double() * factor).to(parameter.dtype))


@contextlib.contextmanager
def perturbed(module: nn.Module, size: float) -> Iterator[None]:
    """Context in which the weights are perturbed by a relative ``size``."""
    weights = [parameter.detach().to("cpu", copy=True) for parameter in module.parameters()]
    try:
        perturb(module, size)
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                parameter.copy_(weight)
