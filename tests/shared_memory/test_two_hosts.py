"""Ranks on two hosts: what they cannot share in memory goes through their process groups."""

import pytest

from harness.fits import Run, assert_parity, fit, reference_of
from lightning_hybrid.pipeline.runtime.transport import GroupTransport, HostTransport
from lightning_hybrid.shared_memory import collectives, sockets
from models.cases import CASES

RUN = Run(CASES["GPT2"], pp=2, tp=2)


def fit_on_hosts(run, host_of_rank):
    """A fit with these ranks on these hosts; also how the ranks of each group communicated."""
    import torch.distributed as dist

    def recorded(kind, name, original):
        def send(self, *args):
            used.add(name)
            return original(self, *args)

        return kind, "send", send

    used: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "_host", lambda: f"host {host_of_rank[dist.get_rank()]}")
        for kind in (GroupTransport, HostTransport):
            patch.setattr(*recorded(kind, kind.__name__, kind.send))
        result = fit(run)
    shared = [made is not None for group, made in collectives.shared_memory.__self__._made.items() if group.size() > 1]
    return result, used, shared


@pytest.mark.parametrize(
    ("host_of_rank", "transport", "shared"),
    [
        ((0, 0, 1, 1), "GroupTransport", True),  # each stage on its own host
        pytest.param((0, 1, 0, 1), "HostTransport", False, marks=pytest.mark.slow),  # tensor ranks apart
    ],
)
def test_parity(worlds, host_of_rank, transport, shared):
    expected = reference_of(worlds, RUN)
    ranks = worlds.run(4, fit_on_hosts, RUN, host_of_rank)
    assert_parity([result for result, *_ in ranks], expected, RUN)
    for _, used, memories in ranks:
        assert used == {transport} and memories == [shared]
