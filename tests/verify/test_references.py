"""The reference is right where a module makes it hard: what it recomputes, what its hooks edit."""

import torch.utils.checkpoint
from wild.suite import check
from wild.test_first import Dropping, Plain

from lightning_hybrid.verify import Layout


class Recomputes(Dropping):
    """Dropout is drawn again in the backward."""

    def forward(self, x):
        for layer in self.net:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Squares(Plain):
    """Its edit of the mean over replicas is not the mean of their edits."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.square_()


def test_recomputed_dropout(worlds):
    report = check(worlds, Recomputes, Layout("pp2", 2, {"pipeline_parallel_size": 2}))
    assert report.outcome == "same", str(report)


def test_gradients_edited_after_the_backward(worlds):
    report = check(worlds, Squares, Layout("dp2", 2), num_microbatches=1)
    assert report.outcome == "same", str(report)
