"""Outcome of a sampled architecture: its step in one process against the same step cut into stages."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from harness.one_process_pipeline import Outcome, keyed, pipeline, reference
from lightning_hybrid.errors import ControlFlowError, PartitionError, StepError
from models.sampled.architectures import Drawn, make

REFUSALS = (StepError, ControlFlowError, PartitionError)
TOLERANCE, LOOSEST = {torch.float64: 1e-10, torch.float32: 1e-5}, 1e-3


@dataclass(frozen=True)
class Trial:
    """One architecture under one number of stages.

    Attributes:
        outcome: "parity"; "refused" with an error of this package; "failed" with another; or "wrong" numbers.
        message: Why, for all but parity.
        dtype: Of the parameters.
        loss_error: Relative.
        gradient_error: The largest over all gradients, each relative to its largest entry.
        noise: The rounding error of the gradients, measured the same way.
        worst: FQN of the parameter with that gradient.
        units: The units of each stage.
    """

    outcome: Literal["parity", "refused", "failed", "wrong"]
    message: str = ""
    dtype: str = ""
    loss_error: float = 0.0
    gradient_error: float = 0.0
    noise: float = 0.0
    worst: str = ""
    units: tuple[tuple[str, ...], ...] = ()


def trial(class_name: str, num_stages: int = 2) -> Trial:
    """Run one architecture; raises ``drawn.Unavailable`` if it does not run in one process."""
    module, batch = make(class_name)
    return compare(module, batch, num_stages)


def compare(module: Drawn, batch: dict[str, Tensor], num_stages: int) -> Trial:
    """The step cut into stages, each with the parameters of the others NaN, against the plain step."""
    dtype = next(module.parameters()).dtype
    name = str(dtype).removeprefix("torch.")
    state = {key: value.clone() for key, value in module.state_dict().items()}

    def step() -> Tensor:
        return module.training_step(batch)

    def as_int(number: int = 0) -> Outcome:
        with keyed().isolated(), keyed().microbatch(number, 0):
            outcome = reference(module, step)
        module.load_state_dict(state)
        return outcome

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = as_int()
        noise = _noise(module, expected, as_int)
        draws = not torch.equal(as_int(1).loss, expected.loss)
        try:
            if draws:  # from generators: keyed by module where there are stages
                expected = pipeline(module, step, 1)
                module.load_state_dict(state)
            got = pipeline(module, step, num_stages)
        except REFUSALS as error:
            return Trial("refused", f"{type(error).__name__}: {error}", name)
        except Exception as error:
            return Trial("failed", f"{type(error).__name__}: {error}", name)
    loss_error = float((got.loss - expected.loss).abs() / expected.loss.abs().clamp(min=1e-12))
    error, worst = gradient_error(got.grads, expected.grads)
    tolerance = min(LOOSEST, max(TOLERANCE[dtype], 100 * noise))
    same = loss_error <= tolerance and error <= tolerance
    message = "" if same else f"loss differs by {loss_error:.2g}, the gradient of {worst} by {error:.2g}"
    units = tuple(tuple(stage) for stage in got.units)
    return Trial("parity" if same else "wrong", message, name, loss_error, error, noise, worst, units)


def _noise(module: Drawn, expected: Outcome, as_int: Any) -> float:
    """The effect of the parameters' last bits: models may compute in float32, or sort, inside."""
    epsilon = 4 * torch.finfo(expected.loss.dtype).eps
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + epsilon)
    return gradient_error(as_int().grads, expected.grads)[0]


def gradient_error(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of a gradient, and whose it is; infinite if one side lacks one."""
    missing = sorted(grads.keys() ^ expected.keys())
    if missing:
        return float("inf"), missing[0]
    floor = 1e-6 * max(float(grad.abs().max()) for grad in expected.values())
    errors = {
        name: float((grads[name] - grad).abs().max()) / max(float(grad.abs().max()), floor)
        for name, grad in expected.items()
    }
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return (errors[worst] if errors[worst] == errors[worst] else float("inf")), worst
