"""Checks before an optimizer step over several ranks: what changed after the optimizers of the run were connected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.errors import StepError
from lightning_hybrid.optimizers.trial import can_step_shards, combines_parameters


class ConnectedOptimizers:
    """The optimizers of a run when it was built, and the parameters whose gradients ranks exchange."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        module: nn.Module,
        *,
        num_replicas: int,
        has_copies: bool,
        sharded: Collection[str],
        is_manual: bool,
        unaveraged: Callable[[], Mapping[int, str]],
        is_sharded: bool,
        steps_in_backward: bool,
        steps_in_float32: bool,
    ) -> None:
        """Take what is connected.

        Args:
            optimizers: Of the Trainer.
            module: The user's.
            num_replicas: That average gradients.
            has_copies: Whether ranks exchange gradients: there are replicas, or stages.
            sharded: FQNs of parameters that are sharded.
            is_manual: Whether the module calls its optimizers itself.
            unaveraged: Returns the FQNs of parameters that got a gradient since the latest average, by their ids.
            is_sharded: Whether a rank has shards, or stages, of the module.
            steps_in_backward: Whether the backward steps parameters by the optimizer that is connected.
            steps_in_float32: Whether the optimizers step bfloat16 parameters in float32.
        """
        self._is_averaging = False
        self._optimizers, self._module = list(optimizers), module
        self._num_replicas, self._has_copies, self._sharded = num_replicas, has_copies, frozenset(sharded)
        self._is_manual, self._unaveraged = is_manual, unaveraged
        self._is_sharded, self._steps_in_backward = is_sharded, steps_in_backward
        self._steps_in_float32 = steps_in_float32
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._known: dict[int, Tensor] = {id(p): p for p in (*module.parameters(), *stepped)}  # alive, so ids stay

    def begin_averaging(self) -> None:
        """A backward of the strategy has averaged gradients, in manual optimization."""
        self._is_averaging = True

    def check(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Check that this optimizer steps as in one process; return its closure, which checks gradients too.

        Raises:
            StepError: It is not.
        """
        if not any(known is optimizer for known in self._optimizers):
            self._check_other(optimizer)
            self._optimizers.append(optimizer)
        if self._has_copies or self._sharded:
            self._check_parameters(optimizer)
        if not self._is_manual or self._num_replicas == 1:
            return closure

        def checked() -> Any:
            result = closure()
            if not self._is_averaging:
                raise StepError(
                    f"{type(optimizer).__name__}.step in manual optimization: no gradient has been averaged over the"
                    f" {self._num_replicas} replicas, because the step has not called self.manual_backward(loss) yet;"
                    " call it in place of loss.backward() or torch.autograd.grad",
                    entry="manual-backward",
                )
            self._check_averages(optimizer)
            return result

        return checked

    def _check_averages(self, optimizer: Optimizer) -> None:
        """Refuse gradients to which another backward has added after their average over the replicas."""
        unaveraged = self._unaveraged()
        for group in optimizer.param_groups if unaveraged else ():
            for p in group["params"]:
                if id(p) in unaveraged and p.grad is not None and bool(p.grad.any()):
                    raise StepError(
                        f"{type(optimizer).__name__}.step in manual optimization: the gradient of"
                        f" {unaveraged[id(p)]} has not been averaged over the {self._num_replicas} replicas, because a"
                        " backward has added to it after the last self.manual_backward(loss); call"
                        " self.manual_backward(loss) in place of each loss.backward()",
                        entry="manual-backward",
                    )

    def _check_other(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if self._steps_in_backward:
            why = "the backward steps parameters by the optimizer that it had then (optimizer_in_backward=True)"
        elif self._steps_in_float32:
            why = "master_weights and stochastic_rounding are for the optimizers that it had then"
        elif self._is_sharded and (combines_parameters(optimizer) or not can_step_shards(optimizer)):
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
