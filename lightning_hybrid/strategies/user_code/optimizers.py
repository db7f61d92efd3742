"""Optimizers that are not torch's: their steps read full parameters and gradients.

A step that updates one parameter at a time is right on each rank's shard. One that takes a norm over all of them, or a
step count from the first one, is not; which of the two a class of the user's is, only its run can show. So it runs as
hooks of the user do: what it reads of other ranks is gathered, and what it does not read is not sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer
from lightning_hybrid.optimizers.replacement import STEP_HOOKS, Place, replace_step
from lightning_hybrid.optimizers.trial import can_step_shards, combines_parameters
from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.params.reads.hooks import HookReads
from lightning_hybrid.params.reads.states import FullStates
from lightning_hybrid.patching import replace
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.strategies.user_code.hooks import closures_wrapped, hidden_hooks


def reads_of_optimizers(optimizers: Iterable[Optimizer], reads: HookReads) -> dict[Optimizer, HookReads]:
    """Return the reads around the steps of optimizers that would step shards in another way than full tensors."""
    found = {}
    for optimizer in optimizers:
        if combines_parameters(optimizer):
            found[optimizer] = reads
        # SparseAdam takes no dense gradients, with which the other question is asked, and one number at a time.
        elif (
            reads.has_shards
            and not isinstance(optimizer, torch.optim.SparseAdam | TrustRatioOptimizer)
            and not can_step_shards(optimizer)
        ):
            found[optimizer] = reads.within_stages()  # torch's own look at one parameter at a time, whatever its stage
    return found


def watch_step(optimizer: Optimizer, reads: HookReads, state: Any) -> Callable[[], None]:
    """Wrap an optimizer's steps in reads, but not the closure, in which the training step runs; return the undo.

    ``state`` is that of the module.
    """
    where = f"{type(optimizer).__name__}.step"
    original = optimizer.step
    known = frozenset(getattr(optimizer, "_optimizer_step_post_hooks", ()))

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if state.is_full:
            return original(*args, **kwargs)
        with _later_hooks_outside(self, known, (self, *args), kwargs), contextlib.ExitStack() as watching:

            def unwatched(closure: Callable[..., Any]) -> Callable[..., Any]:
                def run() -> Any:
                    watching.close()
                    result = closure()
                    watching.enter_context(reads.hook(where, compares_writes=False))
                    return result

                return run

            args, kwargs = closures_wrapped(args, kwargs, unwatched)
            watching.enter_context(reads.hook(where, compares_writes=False))
            return original(*args, **kwargs)

    adopt_states(optimizer, reads)
    return replace_step(optimizer, step, Place.FULL, reason="reads full parameters")


def search_by_mean_loss(optimizer: Optimizer, mesh: Mesh) -> Callable[[], None]:
    """Let an optimizer that decides by its closure's losses see their mean over replicas; return the undo."""
    original = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any]) -> Any:
        def averaged() -> Any:
            loss = closure()
            return mesh.all_reduce(loss.detach().clone(), "data", op="mean") if isinstance(loss, Tensor) else loss

        return original(averaged)

    return replace_step(optimizer, step, Place.SEARCH, reason="searches by the mean loss")


def step_local_shards(optimizer: Optimizer, guards: ReadGuards, states: Sequence[FullStates]) -> Callable[[], None]:
    """Let an optimizer that the user's step calls see shards, where the step sees full tensors; return the undo.

    ``states`` make the sharded states of this optimizer full for code of the user; none if it has no shards.
    """
    original, zero_grad = optimizer.step, optimizer.zero_grad

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for each in states:
                args, kwargs = closures_wrapped(args, kwargs, each.as_user_code)
                stack.enter_context(each.off())
            args, kwargs = closures_wrapped(args, kwargs, guards.as_user_code)
            stack.enter_context(guards.off())
            return original(*args, **kwargs)

    def clear(*args: Any, **kwargs: Any) -> None:
        with guards.off():
            zero_grad(*args, **kwargs)

    why = "works on shards"
    undo = contextlib.ExitStack()
    undo.callback(replace(optimizer, "zero_grad", clear, reason=why))
    undo.callback(replace_step(optimizer, step, Place.GUARDS, reason=why))
    return undo.close


def keeps_lists_per_parameter(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or one inside of it, keeps tensors of each parameter outside of its state."""
    if not combines_parameters(optimizer):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value is not optimizer:
            return True
        lists = value if isinstance(value, list) and all(isinstance(inner, list) for inner in value) else [value]
        copies = [copy for inner in lists if isinstance(inner, list) for copy in inner]
        if copies and len(copies) == len(parameters) and all(map(_has_same_shape, copies, parameters)):
            return True
    return False


def adopt_states(optimizer: Optimizer, reads: HookReads, outer: tuple[Optimizer, ...] = ()) -> None:
    """Make full the tensors that an optimizer, or one inside of it, made of each parameter when it was built; track it.

    These are its state, and lists of tensors shaped as its parameters, in their order, as slow weights are. ``outer``
    are the optimizers that it is inside of.
    """
    reads.unshard_state(optimizer.state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for value in list(vars(optimizer).values()):
        if isinstance(value, Optimizer) and not any(value is known for known in (*outer, optimizer)):
            adopt_states(value, reads, (*outer, optimizer))
        elif isinstance(value, list):
            _adopt_copies(value, parameters, reads)


def _adopt_copies(value: list[Any], parameters: list[Tensor], reads: HookReads) -> None:
    lists = value if all(isinstance(inner, list) for inner in value) else [value]
    copies = [copy for inner in lists for copy in inner]
    if len(copies) != len(parameters) or not all(map(_has_same_shape, copies, parameters)):
        return
    if {id(copy) for copy in copies} & {id(parameter) for parameter in parameters}:
        return  # they are no copies
    state = {parameter: {"copy": copy} for parameter, copy in zip(parameters, copies, strict=True)}
    reads.unshard_state(state)
    adopted = iter(state.values())
    for inner in lists:
        inner[:] = [next(adopted)["copy"] for _ in inner]


def _has_same_shape(value: Any, parameter: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return isinstance(value, Tensor) and tuple(value.shape) == tuple(full_shape(parameter))


@contextlib.contextmanager
def _later_hooks_outside(
    optimizer: Optimizer, known: frozenset[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Run post hooks added after the optimizer was built (by callbacks) outside of the reads."""
    with hidden_hooks(optimizer, lambda key, _: key not in known, STEP_HOOKS[1:]) as [later]:
        yield
    for hook in later:
        hook(optimizer, args, kwargs)
