"""What is patched in torch during a step acts like torch outside of a run; afterwards torch is restored."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.tracing.functions import CompletedWork, intercepted_functions
from lightning_hybrid.step.tracing.instrument import patched_checkpointing
from lightning_hybrid.step.tracing.mode import CurrentRun
from models.autograd_functions import Reverse


def members():
    module = torch.utils.checkpoint
    return dist.all_reduce, dist.broadcast, torch.Tensor.tolist, vars(module)["CheckpointFunction"]


def randomness():
    return KeyedRandomness(0, torch.device("cpu"))


def test_collectives_are_replaced_inside_only():
    before = members()
    with intercepted_functions(CurrentRun()):
        assert members()[:2] != before[:2]
    assert members() == before


def test_torch_is_restored_after_an_error():
    before = members()
    with pytest.raises(ZeroDivisionError), intercepted_functions(CurrentRun()):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), patched_checkpointing(CurrentRun(), randomness()):
        raise ZeroDivisionError
    assert members() == before


def test_autograd_function_is_original_outside_a_run():
    x = torch.ones(3, requires_grad=True)
    with intercepted_functions(CurrentRun()):
        Reverse.apply(x, 2.0).sum().backward()
    expected = torch.ones(3, requires_grad=True)
    Reverse.apply(expected, 2.0).sum().backward()
    assert torch.equal(x.grad, expected.grad) and not torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_in_backward_outside_a_run(reentrant):
    runs = []

    def layer(x):
        runs.append(torch.is_grad_enabled())
        return torch.dropout(x.tanh(), 0.5, True)

    x = torch.linspace(-1, 1, 64, requires_grad=True)
    with patched_checkpointing(CurrentRun(), randomness()):
        out = checkpoint(layer, x, use_reentrant=reentrant)
        assert len(runs) == 1
        out.sum().backward()
    assert len(runs) == 2
    scale = torch.where(out.detach() == 0, 0.0, 2.0)
    torch.testing.assert_close(x.grad, scale * (1 - x.detach().tanh() ** 2))


def test_suppressed_collective_is_complete():
    work = CompletedWork()
    assert work.wait() and work.is_completed()
