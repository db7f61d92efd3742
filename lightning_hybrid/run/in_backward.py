"""Optimizer steps in the backward: refused where a step needs all gradients, connected to the reductions otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_hybrid.errors import BackwardStepError
from lightning_hybrid.optimizers.trial import skips_missing_gradients, steps_independently
from lightning_hybrid.run.run import Run
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.strategies.user_code.hooks import overrides
from lightning_hybrid.techniques.adascale import has_adascale
from lightning_hybrid.techniques.reducers import Reducers

if TYPE_CHECKING:
    from lightning_hybrid.optimizers.in_backward import StepsInBackward
    from lightning_hybrid.optimizers.moved import MovedStates

# Hooks that run when some parameters are stepped already, and gradients are freed, and may read or change both.
_HOOKS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
)


def connect_steps_in_backward(
    run: Run,
    optimizers: Sequence[Optimizer],
    watched: Collection[Optimizer],
    moved: Sequence[MovedStates],
    reducers: Reducers,
) -> StepsInBackward | None:
    """Step parameters as soon as their gradients are averaged, if the user wants it.

    ``watched`` are optimizers that may combine all parameters in their step.

    Raises:
        BackwardStepError: The step needs all gradients at once, or user code may read them.
    """
    setting = run.setting
    if not setting.options.optimizer_in_backward:
        return None
    from lightning_hybrid.optimizers.in_backward import InPlaceSubsetStep, StepsInBackward
    from lightning_hybrid.optimizers.layer_step import LayerwiseStep
    from lightning_hybrid.techniques.offload import parameters_by_layer

    check_setting(setting)
    if has_adascale(setting.trainer):
        raise _refusal("a callback observes the averages of gradients", "remove the callback")
    [optimizer] = optimizers
    check_optimizer(optimizer, is_watched=any(other is optimizer for other in watched))
    if any(p in run.parts.owners for g in optimizer.param_groups for p in g["params"]):
        name = type(optimizer).__name__
        raise _refusal(f"{name} steps full parameters, whose shards go to their owners", "use an elementwise optimizer")
    is_partitioned = run.partitioned is not None
    is_local = not run.active.reduces_gradients and run.mesh.size("data") == 1 and not is_partitioned
    steps = StepsInBackward(
        optimizer,
        next((each for each in moved if isinstance(each, LayerwiseStep)), None) or InPlaceSubsetStep(optimizer),
        parameters_by_layer(setting.module, run.plan) if is_local else [],
        names={id(p): name for name, p in setting.module.named_parameters()},
    )
    run.until_end.callback(steps.close)
    for stage, members in reducers.items():
        # With stages, gradients that belong to no single one are summed over stages after they are averaged.
        for reducer in members if stage is not None or not is_partitioned else ():
            reducer.call_on_averages(steps.step)
    run.active.step_in_backward(steps.step_shards)
    return steps


def check_setting(setting: Setting) -> None:
    """Refuse settings under which the optimizer needs all gradients at once, or user code may read them."""
    trainer: Any = setting.trainer
    if setting.is_manual:
        raise _refusal("the module calls its optimizers itself (manual optimization)", "")
    if getattr(setting.precision, "scaler", None) is not None:
        raise _refusal("the loss scale of precision='16-mixed' is known after all gradients", "use 'bf16-mixed'")
    if trainer.gradient_clip_val:
        raise _refusal(f"gradient_clip_val={trainer.gradient_clip_val} needs all gradients at once", "leave it out")
    if setting.options.verify_first_step:
        raise _refusal("verify_first_step=True compares gradients before the optimizer steps", "set it to False")
    if setting.layout.joins_replicas:
        raise _refusal(f"{setting.layout.option('ep')} exchanges gradients after the backward", "set it to 1")
    changing = [each for each in setting.options.techniques or () if getattr(each, "changes_gradients", False)]
    if changing:
        raise _refusal(f"{type(changing[0]).__name__} changes complete gradients, which are freed then", "leave it out")
    if away := {"parameters", "gradients"} & setting.options.offloaded.keys():
        raise _refusal(
            f"offload has {' and '.join(sorted(away))}, which are stepped between two steps",
            "offload={'optimizer_states': ...} alone",
        )
    for user in (setting.module, *trainer.callbacks):
        for hook in _HOOKS:
            if overrides(user, hook):
                raise _refusal(f"{type(user).__name__}.{hook} may read gradients, which are freed then", "remove it")


def check_optimizer(optimizer: Optimizer, *, is_watched: bool) -> None:
    """Refuse an optimizer that does not step each parameter by itself; small copies of it are tried."""
    name = type(optimizer).__name__
    if is_watched or not steps_independently(optimizer):
        raise _refusal(f"{name} may use several parameters at once in its step", "use an elementwise optimizer")
    if not skips_missing_gradients(optimizer):
        raise _refusal(f"{name} steps parameters without a gradient too", "use another optimizer")
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        raise _refusal(f"a hook before the step of {name} may read gradients, which are freed then", "remove the hook")


def _refusal(why: str, change: str) -> BackwardStepError:
    advice = f"{change}, or optimizer_in_backward=False" if change else "set optimizer_in_backward=False"
    return BackwardStepError(f"optimizer_in_backward=True: {why}; {advice}", entry="backward-step")
