"""A step that takes different paths on ranks of one replica is refused before the first batch, with both lines."""

import pytest

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.errors import RanksDisagree
from models.tiny import Tiny, loader


class SamplesOnOneRank(Tiny):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.trainer.strategy.mesh.rank == 1:
            loss = loss + self.layers[1](batch["x"]).mean()
        return loss


def error_of(pp, options):
    ignore_warnings()
    with pytest.raises(RanksDisagree) as caught:
        trainer_of(2, pp, strategy_options=options).fit(SamplesOnOneRank(), loader(4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("pp", "options", "ranks"), [(2, {}, "pipeline rank"), (1, {"tensor_parallel_size": 2}, "tensor rank")]
)
def test_different_paths_are_refused_with_their_lines(worlds, pp, options, ranks):
    line = SamplesOnOneRank.training_step.__code__.co_firstlineno + 3
    for text in worlds.run(2, error_of, pp, options):
        assert f"different paths through training_step: {ranks} 0 ends, and rank 1 " in text, text
        assert f"({__file__}:{line})" in text and "self.global_rank is the same" in text, text
