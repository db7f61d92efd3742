"""Steps on a thread of the host, with copies that a test makes in place of a GPU's: bitwise equal, and asynchronous."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_hybrid.optimizers.host_pipeline import HostStepPipeline
from lightning_hybrid.optimizers.in_backward import StepsInBackward
from lightning_hybrid.optimizers.layer_step import LayerwiseStep
from lightning_hybrid.techniques.fused_adam import fuse_steps


class Copies:
    """Copies within the host; those to it are complete once `arrive` is set."""

    def __init__(self):
        self.arrive = threading.Event()
        self.arrive.set()

    def to_host(self, tensors, *, may_be_freed):
        return [tensor.clone() for tensor in tensors], SimpleNamespace(synchronize=self.arrive.wait)

    def into(self, pairs):
        for target, source in pairs:
            target.copy_(source)

    def wait(self):
        pass


@pytest.fixture
def copies(monkeypatch):
    made = Copies()
    monkeypatch.setattr(
        LayerwiseStep, "_pipeline_to_host", lambda self: HostStepPipeline(self._optimizer, made), raising=True
    )
    return made


def made(kind=torch.optim.AdamW, **options):
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    groups = [{"params": list(module[:3].parameters())}, {"params": list(module[3:].parameters()), "lr": 3e-3}]
    return module, kind(groups, lr=1e-2, **options)


def backward(module, number):
    module(torch.full((2, 8), 1.0 + number)).square().mean().backward()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})],
    ids=["AdamW", "SGD", "Adagrad"],
)
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_bitwise_equal(copies, tmp_path, kind, options, in_file):
    expected, ordinary = made(kind, **options)
    module, optimizer = made(kind, **options)
    with contextlib.ExitStack() as until:
        fuse_steps([ordinary, optimizer], until)
        offloaded = LayerwiseStep(
            optimizer, [list(layer.parameters()) for layer in module], str(tmp_path) if in_file else None
        )
        fuse_steps([offloaded.host_optimizer], until)
        for number in range(4):
            for one, step in ((expected, ordinary), (module, optimizer)):
                step.param_groups[0]["lr"] = 1e-2 / (number + 1)
                step.zero_grad()
                backward(one, number)
                step.step()
        offloaded.close()
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), ordinary.state_dict(), rtol=0, atol=0)


def test_a_submitted_layer_waits_for_nothing(copies):
    module, optimizer = made()
    expected, ordinary = made()
    layers = [list(layer.parameters()) for layer in module][:3]
    offloaded = LayerwiseStep(optimizer, layers, None)
    steps = StepsInBackward(optimizer, offloaded, layers, names={})
    before = [p.clone() for p in module.parameters()]
    copies.arrive.clear()
    steps.allow(True)
    steps.begin_backward(is_last=True)
    backward(module, 0)
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)), "nothing has arrived"
    assert all(p.grad is None for layer in layers for p in layer)
    copies.arrive.set()
    optimizer.step()
    backward(expected, 0)
    ordinary.step()  # also the parameters that are in no layer
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)
    steps.close()
    offloaded.close()


def test_an_error_of_a_step_reaches_the_caller(copies):
    module, optimizer = made()
    offloaded = LayerwiseStep(optimizer, [list(module.parameters())], None)
    backward(module, 0)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    offloaded.close()
