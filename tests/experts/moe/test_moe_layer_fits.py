"""Modules with MoE layers under the strategy."""

from typing import ClassVar

import pytest
import torch

from harness.fits import Run, assert_parity, fit, fit_joined_batches, reference_of
from harness.worlds.worlds_plugin import RankError
from lightning_hybrid.batch.split import batch_size_of
from models.moe_layers import Experts


class Dropping(Experts):
    options: ClassVar = {"capacity_factor": 0.75, "shared_experts": 1}


class Counting(Experts):
    options: ClassVar = {"score": "sigmoid", "bias_update_rate": 0.1, "balance_loss": 0.0}

    def on_train_batch_end(self, *_):
        for layer in self.layers:
            load = self.all_gather(layer.router.load)
            layer.update_bias(load.view(-1, layer.router.num_experts).sum(0))


class Choosing(Experts):
    options: ClassVar = {"router": "expert_choice", "jitter": 0.1, "gated": False, "activation": "gelu", "bias": True}


BY_SAMPLES = {"microbatch_weight": batch_size_of}  # balance losses and capacities are those of a microbatch


@pytest.mark.parametrize(
    "run",
    [
        Run(Experts, pp=2, strategy=BY_SAMPLES),
        Run(Counting, pp=2, strategy={"recompute": "full"}),
        pytest.param(Run(Counting, pp=2, dp=2), marks=pytest.mark.slow),
        pytest.param(Run(Dropping, pp=2, dp=2, strategy=BY_SAMPLES), marks=pytest.mark.slow),
        pytest.param(Run(Dropping, tp=2, strategy=BY_SAMPLES), marks=pytest.mark.slow),
        pytest.param(Run(Experts, dp=2, strategy={"zero_stage": 3, **BY_SAMPLES}), marks=pytest.mark.slow),
        pytest.param(Run(Choosing, pp=2, strategy={"recompute": "selective", **BY_SAMPLES}), marks=pytest.mark.slow),
    ],
    ids=lambda run: f"{run.case.__name__}-pp{run.pp}-dp{run.dp}-tp{run.tp}",
)
def test_parity(worlds, run):
    """The reference sees the same microbatches: balance losses are means over them."""
    expected = reference_of(worlds, run, fit_joined_batches)
    ranks = worlds.run(run.world_size, fit, run)
    assert_parity(ranks, expected, run)
    biases = [value for name, value in expected.state.items() if name.endswith("router.bias")]
    assert bool(biases) == any(bias.any() for bias in biases) == (run.case is Counting)
    # Microbatches do not give the largest count of a batch, as a warning says: what is nearest depends on the batch.
    assert (run.case is Counting and run.dp > 1) or all(
        rank.logged["load"] == expected.logged["load"] for rank in ranks
    )
    assert all(rank.logged["load"] > 0 for rank in ranks)
    for name, stages in ranks[0].stages.items():
        _, number, *_ = name.split(".")
        assert run.pp == 1 or not name.startswith("layers") or stages == (int(number) // 2,), name


class Breaking(Experts):
    """A router loses its weights in the second batch."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            with torch.no_grad():
                self.layers[3].router.weight.fill_(float("nan"))


def test_non_finite_logits_name_layer_and_step(worlds):
    with pytest.raises(RankError) as caught:
        worlds.run(2, fit, Run(Breaking, dp=2))  # on both ranks, so that neither only receives the other's error
    assert "layers.3" in str(caught.value)
    assert "in training_step of batch 1 (step 1)" in str(caught.value)
