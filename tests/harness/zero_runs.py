"""Runs under ZeRO, with and without offload, and their bitwise comparison."""

import pytest
import torch

from harness.fits import Run, fit

HOST, HERE = "xpu", "cpu"
# Where parameters, gradients and states are in the step, and parameters between steps, by what is offloaded.
SUBSETS = {
    "p": (HOST, HERE, HERE, HERE),
    "g": (HERE, HOST, HERE, HERE),
    "s": (HERE, HERE, HOST, HERE),
    "pg": (HOST, HOST, HERE, HOST),
    "ps": (HOST, HERE, HOST, HOST),
    "gs": (HERE, HOST, HOST, HOST),
    "pgs": (HOST, HOST, HOST, HOST),
}

KINDS = {"p": "parameters", "g": "gradients", "s": "optimizer_states"}


# Where parameters, gradients and states are within a step, and where both are between steps: on the CPU that computes,
# or on a host that is simulated as another device.


def zero(stage, case="GPT2", *, per_layer=False, slow=False, **options):
    strategy = {"zero_stage": stage, "reshard_after_forward": per_layer, **options.pop("strategy", {})}
    run = Run(case, **{"dp": 2, "strategy": strategy, **options})
    return pytest.param(run, marks=pytest.mark.slow) if slow else run


def with_offload(run, where):
    return Run(**{**vars(run), "strategy": {**run.strategy, "offload": where}})


def assert_same_bits(worlds, run, where):
    assert_bits(worlds.run(run.world_size, fit, run), worlds.run(run.world_size, fit, with_offload(run, where)))


def assert_bits(plain, offloaded, *, by_other_kernels=False):
    """Bitwise equal; steps on another device than the CPU are not fused, and so round differently."""
    rounding = {"rtol": 1e-12, "atol": 1e-14} if by_other_kernels else {"rtol": 0, "atol": 0}
    for one, other in zip(plain, offloaded, strict=True):
        assert one.state.keys() == other.state.keys()
        for a, b in [*zip(one.losses, other.losses, strict=True), *((a, other.state[n]) for n, a in one.state.items())]:
            torch.testing.assert_close(b, a, **rounding)
