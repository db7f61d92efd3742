"""Combinations of techniques drawn by seeds equal the plain Trainer in one process."""

import math
from dataclasses import replace

import pytest
import torch
from composition.combinations import LAYOUTS, drawn
from composition.composed import both_runs, fit

# Those that run by default: manual optimization over tensor ranks x ZeRO-3, with a step that is sharded instead, and
# with experts that are recomputed.
DEFAULT = (28, 42, 177)


def differences(got, expected, path=""):
    """Places at which two trees of numbers differ by more than rounding does."""
    if isinstance(expected, dict):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            yield f"{path}: {sorted(map(str, got))} for {sorted(map(str, expected))}"
            return
        for key in expected:
            yield from differences(got[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        if len(got) != len(expected):
            yield f"{path}: {len(got)} for {len(expected)}"
            return
        for index, pair in enumerate(zip(got, expected, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif isinstance(expected, torch.Tensor):
        if got.shape != expected.shape:
            yield f"{path}: shape {tuple(got.shape)} for {tuple(expected.shape)}"
        elif not torch.allclose(got.double(), expected.double(), rtol=1e-10, atol=1e-12):
            yield f"{path}: off by {float((got.double() - expected.double()).abs().max()):.2g}"
    elif isinstance(expected, float):
        tolerance = 1e-6 if path == "/logged/mean" else 1e-10  # a MeanMetric takes values in float32
        if not math.isclose(got, expected, rel_tol=tolerance, abs_tol=1e-12):
            yield f"{path}: {got} for {expected}"
    elif got != expected:
        yield f"{path}: {got!r} for {expected!r}"


def world_size(layout):
    pp, dp, tp, _ = LAYOUTS[layout][0]
    return pp * dp * tp


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in DEFAULT else [pytest.mark.slow]) for seed in range(300)]
)
def test_equals_one_process(worlds, tmp_path, seed):
    check(worlds, tmp_path, drawn(seed))


@pytest.mark.parametrize("experts", ["listed", "stacked"])
def test_manual_steps_of_experts_over_tensor_ranks(worlds, tmp_path, experts):
    """Their gradients, which `zero_grad` reads, are shards of two axes."""
    changes = {"layout": "ep2 x tp2", "then": "ep2", "experts": experts, "optimization": "one manual"}
    plain = {"recompute": None, "batch_norm": False, "replicas": None, "hook": "reads norm", "clipping": "norm"}
    check(worlds, tmp_path, replace(drawn(0), **changes, **plain))


def check(worlds, tmp_path, combination):

    def on_ranks(layout, *arguments):
        return worlds.run(1 if layout is None else world_size(layout), fit, *arguments, timeout=120)

    expected = both_runs(combination, on_ranks, None, None, tmp_path)
    got = both_runs(combination, on_ranks, combination.layout, combination.then, tmp_path)
    for run in ("begun", "ended"):
        [reference] = expected[run]
        for rank, result in enumerate(got[run]):
            found = list(differences(result, reference))
            assert not found, f"{combination}: {run}, rank {rank}: {found[:4]}"
    for file in ("file 1", "file 2"):
        found = list(differences(got[file], expected[file]))
        assert not found, f"{combination}: {file}: {found[:4]}"
