"""Rows selected by model values cross a cut: their number is not known before, so a header is sent first."""

import pytest
import torch
from torch.nn import functional as F

from harness.fits import Run, assert_parity, fit, reference_of
from harness.simulated_host import TRANSPORTS
from lightning_hybrid.pipeline.runtime.transport import GroupTransport, HostTransport
from models.hand_written import Layers


class RowsByHidden(Layers):
    """Layers get the rows that an earlier layer selected: another number in each microbatch."""

    def loss(self, batch):
        x = batch["x"] + self.layers[0](batch["x"])
        picked = x.detach()[:, 0] > 0.0
        rows = self.layers[2](self.layers[1](x[picked]))
        x = x.clone()
        x[picked] = self.layers[3](rows)
        return F.cross_entropy(self.head(x), batch["label"])


def fit_and_record(run, name):
    """A fit; also the row counts of received values of dynamic size, and the kind of transport."""
    recorded = []

    def recorder(kind):
        original = kind.receive

        def receive(self, message, peer, values):
            wait = original(self, message, peer, values)

            def waited():
                tensors = wait()
                pairs = zip(values, tensors, strict=True)
                recorded.extend((kind.__name__, len(tensor)) for value, tensor in pairs if value.dynamic)
                return tensors

            return waited

        return kind, "receive", receive

    with TRANSPORTS[name](), pytest.MonkeyPatch.context() as patch:
        for kind in (GroupTransport, HostTransport):
            patch.setattr(*recorder(kind))
        fitted = fit(run)
    return fitted, recorded


RUN = Run(RowsByHidden, pp=2, batch_size=6, microbatches=3)
GPIPE = Run(RowsByHidden, pp=4, dp=2, batch_size=6, microbatches=3, strategy={"schedule": "gpipe"})
INTERLEAVED = Run(RowsByHidden, pp=2, batch_size=6, microbatches=2, strategy={"stages_per_rank": 2})
CASES = [
    (RUN, "one host"),
    (RUN, "two hosts"),
    (RUN, "as on GPUs"),
    pytest.param(GPIPE, "one host", marks=pytest.mark.slow),
    pytest.param(GPIPE, "two hosts", marks=pytest.mark.slow),
    pytest.param(GPIPE, "as on GPUs", marks=pytest.mark.slow),
    pytest.param(INTERLEAVED, "as on GPUs", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("run", "name"), CASES)
def test_parity(worlds, run, name):
    expected = reference_of(worlds, run)
    ranks = worlds.run(run.world_size, fit_and_record, run, name, timeout=60)
    assert_parity([fitted for fitted, _ in ranks], expected, run)
    recorded = [arrival for _, arrivals in ranks for arrival in arrivals]
    kind = "HostTransport" if name == "one host" else "GroupTransport"
    assert recorded and {used for used, _ in recorded} == {kind}
    assert len({rows for _, rows in recorded}) > 1, "each microbatch has another number of rows"
    assert not torch.equal(expected.losses[0], expected.losses[1])
