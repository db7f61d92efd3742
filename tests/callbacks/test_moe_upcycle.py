"""MoEUpcycle through the Trainer: over stages and replicas it matches single-process training."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler

from harness.fits import FitRecorder
from harness.one_process_pipeline import assert_same_gradients
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.callbacks import ExpertLoadMonitor, MoEUpcycle
from models.cases import Samples, make

MLPS = {"GPT2": "model.transformer.h.*.mlp", "Llama": "model.model.layers.*.mlp", "Layers": "layers.*"}
MICROBATCH, COUNT, STEPS = 2, 2, 2


class Balance(FitRecorder):
    """Records the balance loss of each batch too."""

    def __init__(self):
        super().__init__()
        self.balance = []

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        self.balance.append(float(trainer.callback_metrics["balance_loss"]))


def fit(case, dp, devices, strategy):
    """COUNT microbatches per step and replica: of the strategy, or as batches that plain Lightning accumulates."""
    recorder, monitor = Balance(), ExpertLoadMonitor(every_n_steps=1)
    module = make(case)
    torch.manual_seed(1)
    upcycle = MoEUpcycle(MLPS[case], num_experts=4, top_k=2, balance_loss=0.5, router_std=0.5)
    plain, ddp = strategy is None, strategy == "ddp"
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if plain else strategy if ddp else Hybrid3DStrategy(**strategy),
        accumulate_grad_batches=dp * COUNT if plain else COUNT if ddp else 1,
        callbacks=[monitor, recorder, upcycle],
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
        loader = DataLoader(data, MICROBATCH if ddp else MICROBATCH * COUNT)
    trainer.fit(module, loader)
    recorder.fitted.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    assert "training_step" not in vars(module)
    assert not any("forward" in vars(inner) for inner in list(module.modules())[1:])
    recorder.fitted.extra = {
        "losses": recorder.fitted.losses,
        "balance": recorder.balance,
        "loads": monitor.history.shares,
    }
    return recorder.fitted


def sums(numbers, count, over):
    return [sum(map(float, numbers[at : at + count])) / over for at in range(0, len(numbers), count)]


@pytest.mark.parametrize(
    ("case", "pp", "dp", "options"),
    [
        ("Llama", 1, 1, {"tensor_parallel_size": 2, "sequence_parallel": True}),
        ("GPT2", 2, 2, {}),
        ("Llama", 2, 1, {"recompute": "full"}),
        pytest.param("Llama", 1, 2, {"expert_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("GPT2", 1, 2, {}, marks=pytest.mark.slow),
        pytest.param("Llama", 1, 2, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("Layers", 2, 1, {"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("GPT2", 2, 2, {"zero_stage": 3, "reshard_after_forward": True}, marks=pytest.mark.slow),
    ],
)
def test_upcycled_fit_matches_one_process(worlds, case, pp, dp, options):
    [expected] = worlds.run(1, fit, case, dp, 1, None)
    # The balance loss is that of a microbatch.
    counts = {"num_microbatches": COUNT, "microbatch_weight": batch_size_of}
    strategy = {"pipeline_parallel_size": pp, **counts, **options}
    size = pp * dp * options.get("tensor_parallel_size", 1)
    ranks = worlds.run(size, fit, case, dp, size, strategy)
    assert max(expected.extra["balance"]) > 0.1
    for index, grads in enumerate(expected.grads):
        gathered = {name: grad for rank in ranks for name, grad in rank.grads[index].items()}
        assert_same_gradients(gathered, grads, tolerance=1e-10)
    for recorded in ("losses", "balance"):
        by_replica = [rank.extra[recorded] for rank in ranks[:dp]]
        given = [sum(map(float, values)) / dp for values in zip(*by_replica, strict=True)]
        # Lightning has divided the losses of accumulated batches.
        wanted = sums(expected.extra[recorded], dp * COUNT, 1 if recorded == "losses" else dp * COUNT)
        assert given == pytest.approx(wanted, rel=1e-10)
    loads = expected.extra["loads"]
    assert len(loads) == 4 and all(len(rows) == STEPS for rows in loads.values())
    for rank in ranks:
        assert rank.extra["loads"] == loads  # counts, whose ratios are the same
        torch.testing.assert_close(rank.state, expected.state, rtol=1e-8, atol=1e-10)


def test_upcycling_under_other_strategies(worlds):
    [expected] = worlds.run(1, fit, "Llama", 2, 1, None)
    ranks = worlds.run(2, fit, "Llama", 2, 2, "ddp")
    for rank in ranks:
        for grads, wanted in zip(rank.grads, expected.grads, strict=True):
            assert_same_gradients(grads, wanted, tolerance=1e-10)
        assert rank.extra["loads"] == expected.extra["loads"]
