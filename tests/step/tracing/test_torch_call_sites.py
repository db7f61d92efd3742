"""The lines of the user that call torch."""

import torch

from lightning_hybrid.step.objects.names import EXPERT_RANKS
from lightning_hybrid.step.tracing.lines import TorchCallSites, user_call_sites

HIDDEN = torch.ones(4, 2)


def user_code(x):
    return torch.tanh(x).sum()


def test_calls_are_traced_with_the_lines_of_the_user():
    with TorchCallSites() as trace:
        user_code(HIDDEN)
    torch.exp(HIDDEN)  # after the trace
    assert [function.__name__ for function, _ in trace.calls] == ["tanh", "sum"]
    line = f"{__file__}:{user_code.__code__.co_firstlineno + 1}"
    sites = user_call_sites(trace.calls)
    assert set(sites.values()) == {line} and len(sites) == 2, "two functions on one line have two hashes"
    with TorchCallSites() as again:
        user_code(HIDDEN)
    assert user_call_sites(again.calls) == sites


def test_calls_between_ranks_of_experts_are_not_the_users():
    """But those of the experts' own code are."""
    names = {}
    source = "def run(expert, x):\n    return expert(x.clone()).clone()"
    exec(compile(source, f"{EXPERT_RANKS}/run_experts.py", "exec"), names)

    with TorchCallSites() as around:
        names["run"](torch.Tensor.sin, HIDDEN)
    with TorchCallSites() as inside:
        names["run"](user_code, HIDDEN)
    assert [function.__name__ for function, _ in around.calls] == ["clone", "sin", "clone"]
    assert not user_call_sites(around.calls)
    assert len(user_call_sites(inside.calls)) == 2
