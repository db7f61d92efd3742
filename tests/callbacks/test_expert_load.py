"""ExpertLoadMonitor: metrics of routing reports, the layers that it observes, and the picture."""

import math
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

from lightning_hybrid.callbacks import ExpertLoadMonitor, pictures
from lightning_hybrid.callbacks.expert_load import find_layers
from lightning_hybrid.experts import MoE, Report
from lightning_hybrid.experts.metrics import DroppedShare, ExpertLoad, LoadBalance, LoadEntropy, RouterEntropy
from models.cases import Samples, make
from models.hand_written import WIDTH, Lit


def report(load, dropped=0.0, entropy=0.0):
    return Report(torch.zeros(()), *map(torch.tensor, (load, dropped, entropy)))


def test_metrics_of_two_reports():
    metrics = MetricCollection(
        [kind(4) for kind in (ExpertLoad, LoadBalance, LoadEntropy, DroppedShare, RouterEntropy)]
    )
    metrics.update(report([4.0, 0.0, 0.0, 0.0], dropped=2.0, entropy=0.5))
    metrics.update(report([0.0, 4.0, 0.0, 0.0], entropy=1.0))
    values = metrics.compute()
    assert values["ExpertLoad"].tolist() == [0.5, 0.5, 0.0, 0.0]
    wanted = {"LoadBalance": 2.0, "LoadEntropy": 0.5, "DroppedShare": 0.25, "RouterEntropy": 0.75}
    assert {name: pytest.approx(float(values[name])) for name in wanted} == wanted
    assert len(metrics.compute_groups) == 1
    with pytest.raises(ValueError, match=r"LoadBalance\(num_experts=4\) got a report of 3 experts"):
        LoadBalance(4).update(report([1.0, 1.0, 1.0]))


def test_zero_routed_tokens_count_as_balanced():
    metric = LoadBalance(4)
    metric.update(report([0.0] * 4))
    assert float(metric.compute()) == 1.0


class Router(nn.Module):
    """A third-party router: scores, and the chosen indices."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = 3, 2
        self.weight = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        scores = F.linear(x, self.weight).softmax(-1)
        top = scores.topk(2)
        return scores, top.values, top.indices


class Mixed(Lit):
    """One MoE layer of this package, and a foreign router."""

    def __init__(self):
        super().__init__()
        self.moe = MoE(WIDTH, 8, num_experts=4, top_k=2, capacity_factor=0.75)
        self.gate = Router()
        self.seen = []

    def loss(self, batch):
        y, routing_report = self.moe(batch["x"])
        scores, _, indices = self.gate(y)
        self.seen.append(
            (
                routing_report.load.tolist(),
                float(routing_report.dropped),
                torch.bincount(indices.flatten(), minlength=3).tolist(),
            )
        )
        return y.square().mean() + routing_report.loss + scores.square().mean()


def test_monitor_reports_each_layer_in_training_only(tmp_path):
    module = make("Layers")
    with pytest.raises(ValueError, match="finds no experts in Layers"):
        fit(module, ExpertLoadMonitor())
    module = Mixed()
    assert [name for name, _ in find_layers(module)] == ["moe", "gate"]
    monitor = ExpertLoadMonitor(tmp_path / "there" / "load.png", every_n_steps=3)
    with mock.patch.object(pictures, "log_picture") as logged:
        trainer = fit(module, monitor)
    assert logged.call_args.args[1::2] == ("expert_load", 4)
    training = [seen for seen in module.seen if seen is not None][:4]
    assert monitor.history.steps == [3, 4]
    for layer, place in (("moe", 0), ("gate", 2)):
        for row, steps in zip(monitor.history.shares[layer], (training[:3], training[3:]), strict=True):
            load = torch.tensor([step[place] for step in steps]).double().sum(0)
            assert row == pytest.approx((load / load.sum()).tolist())
    assert float(trainer.callback_metrics["expert_dropped"]) > 0
    assert 1 <= float(trainer.callback_metrics["expert_balance"]) < 4
    assert (tmp_path / "there" / "load.png").stat().st_size > 10_000
    assert "forward" not in vars(module.moe) and "training_step" not in vars(module)
    assert math.isfinite(float(module.moe(torch.randn(2, WIDTH))[1].entropy))


def fit(module, monitor):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, num_sanity_val_steps=0, callbacks=[monitor], **quiet)
    loader = DataLoader(Samples(module.kind, 8, torch.float32), 2)
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "load.txt"}, ValueError, r"path='load\.txt' must end in \.png, \.svg, \.pdf"),
        ({"every_n_steps": 0}, ValueError, "every_n_steps=0 must be at least 1"),
        ({"every_n_steps": 1.5}, TypeError, "every_n_steps=1.5 must be an int"),
    ],
)
def test_arguments_are_validated(options, error, message):
    with pytest.raises(error, match=message):
        ExpertLoadMonitor(**options)
