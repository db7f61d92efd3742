"""The harness itself: worlds that work, fail, hang and die."""

import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from harness.worlds.worlds_plugin import RankError


class OneLayer(LightningModule):
    """The smallest module that fits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.linear(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(16, 4, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def fit(devices):
    model = OneLayer()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=1,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer.global_step, trainer.world_size, model.linear.weight.detach()


def sum_of_ranks(scale):
    total = torch.tensor(float(dist.get_rank() * scale))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on(rank):
    if dist.get_rank() == rank:
        print("a line printed before the failure")
        expected = 3
        assert expected == rank
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank):
    if dist.get_rank() == rank:
        dist.barrier()


def process_id():
    return os.getpid()


_calls = []


def number_of_calls():
    _calls.append(None)
    return len(_calls)


def environment():
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")}


@pytest.mark.world(2)
def test_body_runs_on_two_ranks():
    assert dist.get_world_size() == 2
    assert sum_of_ranks(1)[1] == 1


@pytest.mark.world(4)
@pytest.mark.parametrize("scale", [1, 10])
def test_parametrised_body_runs_on_four_ranks(scale, tmp_path):
    (tmp_path / str(dist.get_rank())).touch()
    assert sum_of_ranks(scale)[1] == 6 * scale
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.world(n)) for n in (1, 2)])
def test_parameter_chooses_the_world(n):
    assert dist.get_world_size() == n


class TestInAClass:
    @pytest.mark.world(2)
    def test_method_runs_on_ranks(self):
        assert dist.get_world_size() == 2


@pytest.mark.world(2)
def test_rank_may_skip():
    pytest.skip("every rank skips")


@pytest.mark.world(2)
@pytest.mark.xfail(strict=True, reason="the failure of a rank is the failure of the test")
def test_failing_rank_fails_its_test():
    assert dist.get_rank() == 0


def test_results_come_back_by_rank(worlds):
    assert worlds.run(1, sum_of_ranks, 1) == [(0, 0.0)]
    assert worlds.run(4, sum_of_ranks, scale=2) == [(rank, 12.0) for rank in range(4)]


def test_ranks_have_the_environment_of_torchrun(worlds):
    for rank, seen in enumerate(worlds.run(2, environment)):
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }


def test_single_process_tests_use_one_thread():
    assert torch.get_num_threads() == 1


def test_world_is_reused_until_it_fails(worlds):
    before = worlds.run(2, process_id)
    assert worlds.run(2, process_id) == before
    assert os.getpid() not in before
    with pytest.raises(RankError):
        worlds.run(2, fail_on, 0, grace=0.2)
    assert not set(worlds.run(2, process_id)) & set(before)


def test_a_reference_is_run_once(worlds):
    first = worlds.run_once(2, number_of_calls)
    assert worlds.run(2, number_of_calls) == [count + 1 for count in first]
    assert worlds.run_once(2, number_of_calls) == first


def test_failure_report_contents(worlds):
    with pytest.raises(RankError) as caught:
        worlds.run(4, fail_on, 1, grace=2)
    message = str(caught.value)
    assert message.startswith("rank 1 of 4 failed first:")
    assert "AssertionError: assert 3 == 1" in message
    assert "a line printed before the failure" in message
    assert "ranks still running: 0, 2, 3" in message
    assert "in fail_on" in message[message.index("rank 0 was at") :]


def test_dead_rank_is_named(worlds):
    with pytest.raises(RankError, match=r"rank 1.*\n*.*the process died \(exit code 7\)"):
        worlds.run(2, die_on, 1)


def test_timeout_shows_where_each_rank_hangs(worlds):
    with pytest.raises(RankError) as caught:
        worlds.run(2, hang_on, 1, timeout=2)
    message = str(caught.value)
    assert message.startswith("timeout: 1 of 2 ranks still running after 2 s")
    assert "in hang_on" in message[message.index("rank 1 was at") :]


def test_unpicklable_arguments_are_refused(worlds):
    with pytest.raises(TypeError, match="cannot be sent to a rank"):
        worlds.run(1, sum_of_ranks, lambda: None)


def test_lightning_fits_twice_in_one_world_and_after_a_failure(worlds):
    first, second = worlds.run(2, fit, 2), worlds.run(2, fit, 2)
    with pytest.raises(RankError):
        worlds.run(2, fail_on, 0, grace=0.2)
    third = worlds.run(2, fit, 2)
    [alone] = worlds.run(1, fit, 1)
    for results in (first, second, third):
        for steps, world_size, weight in results:
            assert (steps, world_size) == (2, 2)
            torch.testing.assert_close(weight, first[0][2], rtol=0, atol=0)
    assert alone[:2] == (4, 1)


@pytest.mark.world(2)
def test_lightning_fits_twice_in_one_task():
    steps, world_size, weight = fit(2)
    again = fit(2)
    assert (steps, world_size) == (2, 2)
    assert torch.equal(weight, again[2])
