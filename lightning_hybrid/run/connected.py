"""The optimizers of a run: what they are connected to, and what is checked before each of their steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.errors import StepError
from lightning_hybrid.optimizers.trial import can_step_shards, combines_parameters
from lightning_hybrid.run.run import Run
from lightning_hybrid.techniques.reducers import Reducers

if TYPE_CHECKING:
    from lightning_hybrid.optimizers.in_backward import StepsInBackward
    from lightning_hybrid.optimizers.moved import MovedStates
    from lightning_hybrid.params.reads.states import FullStates
    from lightning_hybrid.pipeline.runtime.gradients import TiedParameters
    from lightning_hybrid.replicate.buffers import ReplicaBufferBroadcast
    from lightning_hybrid.replicate.drift import CopiedParameters


class ConnectedOptimizers:
    """The optimizers of a run when it was built, and the parameters whose gradients ranks exchange."""

    def __init__(self, run: Run, optimizers: Sequence[Optimizer], reducers: Reducers) -> None:
        self._run, self._optimizers, self._reducers = run, list(optimizers), reducers
        self._module, self._num_replicas = run.setting.module, run.setting.world.mesh.size("data")
        # Whether ranks exchange gradients: there are replicas, or stages.
        self._has_copies = run.mesh.size("data") > 1 or bool(run.gathered_shardings) or run.is_pipelined
        self._sharded = run.parts.names
        self._is_averaging = False
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._known: dict[int, Tensor] = {id(p): p for p in (*self._module.parameters(), *stepped)}  # so ids stay

    def has_run_backward(self, *, averages: bool) -> None:
        """A backward of the strategy is over; it ``averages`` unless each replica steps its own full parameters."""
        self._is_averaging |= averages or not self._run.gathered_shardings

    def check(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Check that this optimizer steps as in one process; return its closure, which checks gradients too."""
        if not any(known is optimizer for known in self._optimizers):
            self._check_other(optimizer)
            self._optimizers.append(optimizer)
        if self._has_copies or self._sharded:
            self._check_parameters(optimizer)
        if not self._run.setting.is_manual or self._num_replicas == 1:
            return closure

        def checked() -> Any:
            result = closure()
            if not self._is_averaging:
                raise StepError(
                    f"{type(optimizer).__name__}.step in manual optimization: no gradient has been averaged over the"
                    f" {self._num_replicas} replicas, because the step has not called self.manual_backward(loss) yet"
                    " with sync_grad=True; call it in place of loss.backward() or torch.autograd.grad",
                    entry="manual-backward",
                )
            self._check_averages(optimizer)
            return result

        return checked

    def _check_averages(self, optimizer: Optimizer) -> None:
        """Refuse gradients to which another backward has added after their average over the replicas."""
        unaveraged = {key: name for each in self._reducers.every for key, name in each.unaveraged.items()}
        for group in optimizer.param_groups if unaveraged else ():
            for p in group["params"]:
                with torch._C.DisableTorchFunctionSubclass():  # the shard's: other ranks may have averaged theirs
                    gradient = p.grad
                if id(p) in unaveraged and gradient is not None and bool(gradient.any()):
                    raise StepError(
                        f"{type(optimizer).__name__}.step in manual optimization: the gradient of"
                        f" {unaveraged[id(p)]} has not been averaged over the {self._num_replicas} replicas, because a"
                        " backward has added to it after the last self.manual_backward(loss); call"
                        " self.manual_backward(loss) in place of each loss.backward()",
                        entry="manual-backward",
                    )

    def _check_other(self, optimizer: Optimizer) -> None:
        name, setting = type(optimizer).__name__, self._run.setting
        if setting.options.optimizer_in_backward:
            why = "the backward steps parameters by the optimizer that it had then (optimizer_in_backward=True)"
        elif setting.steps_in_float32:
            why = "master_weights and stochastic_rounding are for the optimizers that it had then"
        elif self._run.is_sharded and (combines_parameters(optimizer) or not can_step_shards(optimizer)):
            why = f"{name} may need several parameters, or all elements of one, of which this rank has shards"
        else:
            return
        raise StepError(
            f"{name} has taken the place of another optimizer after the run had begun, and {why}; return it from"
            " configure_optimizers, or begin another fit with it",
            entry="optimizer-replaced",
        )

    def _check_parameters(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._known:
                    continue
                names = {id(parameter): name for name, parameter in self._module.named_parameters()}
                name = names.get(id(p), "a parameter that is not the module's")
                if self._has_copies or name in self._sharded:
                    raise StepError(
                        f"{name}, of shape {tuple(p.shape)}, was made after the run had begun, so that ranks do not"
                        " exchange its gradient; write into the old parameter"
                        " (parameter.data.copy_(...)), make it in __init__ or configure_model, or begin another fit",
                        entry="optimizer-new-parameter",
                    )
                self._known[id(p)] = p


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """Gradient reducers and optimizer steps of a run, under one layout.

    Attributes:
        reducers: Average gradients over replicas, by the stage after which they are complete; None: after all.
        tied: Sums gradients of parameters that several stages hold.
        buffers: Sends the buffers of the first replica to the others.
        copied: Parameters that tensor or context ranks hold alike.
        moved: Optimizers whose states are elsewhere between their steps.
        watched: Optimizers whose steps read parameters of other ranks.
        in_backward: Steps parameters in the backward, if the user wants it.
        connected: The optimizers that all of this is connected to; None before there are any.
        states: Of optimizers that the module calls itself, where they are shards.
        step_hooks: Numbers of the hooks on steps that optimizers were built with.
    """

    reducers: Reducers = dataclasses.field(default_factory=Reducers)
    tied: TiedParameters | None = None
    buffers: ReplicaBufferBroadcast | None = None
    copied: tuple[CopiedParameters, ...] = ()
    moved: tuple[MovedStates, ...] = ()
    watched: tuple[Optimizer, ...] = ()
    in_backward: StepsInBackward | None = None
    connected: ConnectedOptimizers | None = None
    states: tuple[FullStates, ...] = ()
    step_hooks: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def full_states(self) -> Iterator[None]:
        """A context in which code of the user reads full states."""
        with contextlib.ExitStack() as stack:
            for each in self.states:
                stack.enter_context(each.on())
            yield
