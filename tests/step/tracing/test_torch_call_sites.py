"""The lines of the user that call torch."""

import torch

from lightning_hybrid.step.tracing.record_user_lines_calling_torch import TorchCallSites, user_call_sites

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
