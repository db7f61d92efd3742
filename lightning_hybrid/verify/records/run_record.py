"""What one rank sees of a run, in a form that can be sent to another process."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.mesh import is_lost_connection
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.zero.optimizer_states.replaced_step import replace_step


@dataclass
class Step:
    """After one training batch.

    Attributes:
        loss: Of this rank's replica; None if the step returned none.
        metrics: ``trainer.callback_metrics``.
        learning_rates: Of every parameter group.
        grad_norms: Of each parameter that this rank stepped on, by FQN.
        weights: The parameters that this rank holds, by FQN.
    """

    loss: float | None
    metrics: dict[str, float]
    learning_rates: list[float]
    grad_norms: dict[str, float]
    weights: dict[str, Tensor]


@dataclass
class Failure:
    """How a run ended before its end.

    Attributes:
        message: Type and text of the exception.
        refused: Whether it is a clear error of this package's, raised before any parameter changed.
        where: File and line that raised.
        lost: Whether it only says that another rank is not there any more.
        unchanged: Whether no parameter of this rank had changed.
    """

    message: str
    refused: bool
    where: str
    lost: bool = False
    unchanged: bool = False


@dataclass
class Observed:
    """One run, as one rank saw it.

    Attributes:
        replica: Which replica's batches this rank saw.
        start: The parameters that this rank holds before the first step.
        perturbed: The same with what was added to them, if anything was.
        steps: One entry per training batch.
        validations: ``trainer.callback_metrics`` after each validation.
        metrics: The same after the run.
        tests: The same after a test, if the module and its data have one.
        predictions: Tensors and numbers of what a prediction returned, by where they are in it; likewise.
        coarse: Names of metrics that are kept in less than float64.
        weights: All parameters after the run.
        buffers: All buffers after the run.
        trained: FQNs of the parameters that want gradients.
        uncut: Names of steps of evaluation that each rank ran whole.
        at_once: Names of steps whose batches were one microbatch each.
        shares: Ranks that hold shards instead of stages.
        in_shares: Whether they ran training steps on shares of a batch, but for the first.
        pipelined: The first training batch that ran in stages, and the first after them that did not, if the layout
            has changed.
        replica_losses: For each step the loss of each replica; in a reference of several.
        replica_buffers: The buffers of each replica; in a reference of several.
        replica_predictions: The predictions of each replica; in a reference.
        failure: How it failed.
    """

    replica: int = 0
    start: dict[str, Tensor] = field(default_factory=dict)
    perturbed: dict[str, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    predictions: dict[str, Tensor] = field(default_factory=dict)
    coarse: set[str] = field(default_factory=set)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    uncut: frozenset[str] = frozenset()
    at_once: frozenset[str] = frozenset()
    shares: int = 1
    in_shares: bool = False
    pipelined: tuple[int, int | None] = (0, None)
    replica_losses: list[list[float]] = field(default_factory=list)
    replica_buffers: list[dict[str, Tensor]] = field(default_factory=list)
    replica_predictions: list[dict[str, Tensor]] = field(default_factory=list)
    failure: Failure | None = None


class Notes:
    """Hooks that fill an ``Observed``; to be mixed with the Callback of the module's Lightning."""

    def __init__(self, perturbation: float) -> None:
        """Args: perturbation: relative size of what is added to the weights before the first step."""
        self.observed = Observed()
        self._perturbation = perturbation
        self._grad_norms: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the start, perturb it, and watch the optimizers."""
        self.observed.start = held(pl_module.named_parameters(), trainer)
        self.observed.trained = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        self.observed.replica = getattr(trainer.strategy, "data_rank", trainer.global_rank)
        if self._perturbation:
            perturb(pl_module, self._perturbation)
            self.observed.perturbed = held(pl_module.named_parameters(), trainer)
        for optimizer in trainer.optimizers:
            _after_steps(optimizer, self._after_step(trainer, pl_module))

    def _after_step(self, trainer: Any, module: nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        def note(optimizer: torch.optim.Optimizer) -> None:
            names = {id(p): name for name, p in module.named_parameters()}
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None and not is_absent(parameter) and not is_absent(parameter.grad):
                    gradient = parameter.grad.detach()
                    if (parts := _parts_of(trainer)) is not None:
                        gradient = parts.whole_like(parameter, gradient)
                    gradient = gradient.to_dense() if gradient.is_sparse else gradient
                    norm = torch.linalg.vector_norm(gradient.double() if gradient.is_floating_point() else gradient)
                    self._grad_norms[names.get(id(parameter), "a parameter outside of the module")] = float(norm)

        return note

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what the step left behind."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.observed.steps.append(
            Step(
                loss=float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 and not is_absent(loss) else None,
                metrics=self._numbers(trainer.callback_metrics),
                learning_rates=rates,
                grad_norms=self._grad_norms,
                weights=held(pl_module.named_parameters(), trainer),
            )
        )
        self._grad_norms = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what validation logged."""
        self.observed.validations.append(self._numbers(trainer.callback_metrics))

    def finish(self, trainer: Any, module: nn.Module) -> Observed:
        """Note what is there after the run."""
        self.observed.metrics = self._numbers(trainer.callback_metrics)
        self.observed.weights = held(module.named_parameters(), trainer)
        self.observed.buffers = held(module.named_buffers(), trainer)
        self._note_steps(trainer)
        return self.observed

    def note_test(self, trainer: Any) -> None:
        """Note what a test logged."""
        self.observed.tests = self._numbers(trainer.callback_metrics)
        self._note_steps(trainer)

    def note_predictions(self, predictions: Any, trainer: Any) -> None:
        """Note what came out of a prediction."""
        self._note_steps(trainer)
        num_loaders = trainer.predict_loop.num_dataloaders
        self.observed.predictions = leaves_of([predictions] if num_loaders == 1 else predictions)

    def _note_steps(self, trainer: Any) -> None:
        run = getattr(trainer.strategy, "run", None)
        if run is None:  # another strategy, whose steps are those of one process
            return
        self.observed.uncut |= run.uncut_steps
        self.observed.at_once |= run.steps_at_once
        self.observed.shares = max(self.observed.shares, run.batch_shares)
        self.observed.pipelined = trainer.strategy.pipelined_batches
        self.observed.in_shares |= run.shares_batches

    def _numbers(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        self.observed.coarse.update(name for name, value in metrics.items() if value.dtype != torch.float64)
        return {name: float(value) for name, value in metrics.items()}


def held(tensors: Iterable[tuple[str, Tensor]], trainer: Any = None) -> dict[str, Tensor]:
    """Copies of those tensors whose content is on this rank.

    Args:
        tensors: Parameters or buffers, by FQN.
        trainer: Whose strategy may have cut them over tensor ranks; then they are joined, which is collective.
    """
    parts = _parts_of(trainer)
    return {
        name: (tensor if parts is None else parts.whole_of(name, tensor)).detach().to("cpu", copy=True)
        for name, tensor in tensors
        if not is_absent(tensor) and not tensor.is_meta
    }


def leaves_of(loaders: list[Any]) -> dict[str, Tensor]:
    """Tensors and numbers of predictions, by where they are: loader, batch, and place in what the step returned."""
    leaves = torch.utils._pytree.tree_flatten_with_path(loaders)[0]
    return {
        torch.utils._pytree.keystr(path): torch.as_tensor(leaf).detach().to("cpu", copy=True)
        for path, leaf in leaves
        if isinstance(leaf, Tensor | float | int)
    }


def _parts_of(trainer: Any) -> Any:
    return getattr(getattr(getattr(trainer, "strategy", None), "run", None), "parts", None)


def perturb(module: nn.Module, size: float) -> None:
    """Change every weight by a random share of itself, of a relative ``size``."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                factor = (1 + size * noise).to(parameter.device)
                parameter.copy_((parameter.double() * factor).to(parameter.dtype))


def describe_failure(error: Exception, *, steps_done: int) -> Failure:
    """Tell a refusal from a crash: it was raised by a ``raise`` in this package, and nothing has changed yet."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    ours = last is not None and _raised_here(last)
    unchanged = steps_done == 0
    refused = ours and unchanged and not isinstance(error, AssertionError)
    where = "" if last is None else f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    return Failure(f"{type(error).__name__}: {error}", refused, where, is_lost_connection(error), unchanged)


_RAISES_NO_REFUSALS = ("lightning_hybrid.verify", "lightning_hybrid.shared_memory")


def _raised_here(frame: TracebackType) -> bool:
    module = str(frame.tb_frame.f_globals.get("__name__", ""))
    # Who loses its connection to another rank, or waits for it in vain, refuses nothing.
    if not module.startswith("lightning_hybrid.") or module.startswith(_RAISES_NO_REFUSALS):
        return False
    # An operation of torch that fails in code of ours leaves no frame of its own, but it is no refusal.
    code = frame.tb_frame.f_code.co_code
    return dis.opname[code[frame.tb_lasti]] == "RAISE_VARARGS"


def _after_steps(optimizer: torch.optim.Optimizer, note: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``note`` after each step; not as a hook, which wrappers without torch's ``__init__`` have none of."""
    original = optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(self)
        return result

    replace_step(optimizer, step)
