"""Upcycled modules through the Trainer: over stages and replicas their numbers are those of one process."""

import pytest
import torch
from lightning.pytorch import Trainer
from models import Samples, make
from one_process.in_process import assert_same_gradients
from torch.utils.data import DataLoader, DistributedSampler
from trainer.fitting import Notes

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import MoEUpcycle

MLPS = {"GPT2": "model.transformer.h.*.mlp", "Llama": "model.model.layers.*.mlp", "Layers": "layers.*"}
MICROBATCH, COUNT, STEPS = 2, 2, 3


class Balance(Notes):
    """Notes the balance loss of each batch too."""

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        self.fitted.extra = [*(self.fitted.extra or ()), float(trainer.callback_metrics["balance_loss"])]


def fit(case, dp, devices, strategy):
    """COUNT microbatches per step and replica: of the strategy, or as batches that plain Lightning accumulates."""
    notes = Balance()
    module = make(case)
    torch.manual_seed(1)
    upcycle = MoEUpcycle(MLPS[case], num_experts=3, top_k=2, balance_loss=0.5, router_std=0.5)
    plain = strategy is None
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if plain else Hybrid3DStrategy(**strategy),
        accumulate_grad_batches=dp * COUNT if plain else 1,
        callbacks=[notes, upcycle],
        max_epochs=1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    data = Samples(module.kind, MICROBATCH * COUNT * STEPS * dp)
    if plain:
        ranks = [list(range(len(data)))]
        if dp > 1:
            ranks = [list(DistributedSampler(data, dp, rank, shuffle=True)) for rank in range(dp)]
        size = MICROBATCH * COUNT
        order = [i for start in range(0, size * STEPS, size) for rank in ranks for i in rank[start : start + size]]
        loader = DataLoader(data, MICROBATCH, sampler=order)
    else:
        loader = DataLoader(data, MICROBATCH * COUNT)
    trainer.fit(module, loader)
    notes.fitted.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    assert "training_step" not in vars(module)
    return notes.fitted


def sums(numbers, count, over):
    return [sum(map(float, numbers[at : at + count])) / over for at in range(0, len(numbers), count)]


@pytest.mark.parametrize(
    ("case", "pp", "dp", "options"),
    [
        ("GPT2", 2, 1, {}),
        ("Llama", 1, 2, {"recompute": "full"}),
        ("Llama", 2, 1, {"recompute": "full"}),
        ("GPT2", 2, 2, {}),
        ("Layers", 2, 1, {"recompute": "selective"}),
        ("GPT2", 2, 2, {"zero_stage": 3, "reshard_after_forward": True}),
    ],
)
def test_stages_replicas_and_recomputation_change_no_number(worlds, case, pp, dp, options):
    [expected] = worlds.run(1, fit, case, dp, 1, None)
    strategy = {"pipeline_parallel_size": pp, "num_microbatches": COUNT, **options}
    ranks = worlds.run(pp * dp, fit, case, dp, pp * dp, strategy)
    assert max(expected.extra) > 0.1
    for index, grads in enumerate(expected.grads):
        gathered = {name: grad for rank in ranks for name, grad in rank.grads[index].items()}
        assert_same_gradients(gathered, grads, tolerance=1e-10)
    for noted in ("losses", "extra"):
        by_replica = [getattr(rank, noted) for rank in ranks[:dp]]
        given = [sum(map(float, values)) / dp for values in zip(*by_replica, strict=True)]
        # Lightning has divided the losses of accumulated batches.
        wanted = sums(getattr(expected, noted), dp * COUNT, 1 if noted == "losses" else dp * COUNT)
        assert given == pytest.approx(wanted, rel=1e-10)
    for rank in ranks:
        torch.testing.assert_close(rank.state, expected.state, rtol=1e-8, atol=1e-10)
