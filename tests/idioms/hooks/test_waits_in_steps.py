"""Steps that call a method of their strategy in which all ranks wait: as in one process, and not for ever."""

import pytest

from harness.stored_values import StoresValues, assert_equal, run


class Waits(StoresValues):
    def store(self, loss, out, batch, batch_idx):
        self.trainer.strategy.barrier()


class Broadcasts(StoresValues):
    def __init__(self):
        super().__init__()
        self.seen = []

    def store(self, loss, out, batch, batch_idx):
        self.seen.append(self.trainer.strategy.broadcast(batch_idx))


class Gathers(StoresValues):
    def store(self, loss, out, batch, batch_idx):
        self.log("gathered", self.all_gather(loss.detach()).mean())
        self.log("reduced", self.trainer.strategy.reduce(loss.detach(), reduce_op="mean"))


LAYOUTS = {"pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2}, "tp2": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [Waits, Broadcasts, Gathers])
def test_a_step_may_wait_for_all_ranks(worlds, make, layout):
    expected = run(make, 1, {})
    for found in worlds.run(2, run, make, 2, dict(LAYOUTS[layout]), timeout=60):
        assert_equal(list(found), list(expected))
