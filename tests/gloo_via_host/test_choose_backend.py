"""Which backend ranks get that share a GPU."""

import sys
import textwrap

import pytest
import torch

from harness.launched_jobs import run
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.gloo_via_host.choose_backend import choose_backend, describe_sharing

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("requested", "device", "num_ranks", "chosen"),
    [
        (None, FIRST, 1, None),
        ("nccl", FIRST, 1, "nccl"),
        (None, FIRST, 2, "gloo_via_host"),
        ("gloo", FIRST, 2, "gloo_via_host"),
        ("gloo", FIRST, 1, "gloo_via_host"),
        ("gloo", torch.device("cpu"), 2, "gloo"),
        (None, torch.device("cpu"), 2, None),
    ],
)
def test_choice(requested, device, num_ranks, chosen):
    assert choose_backend(requested, device, num_ranks) == chosen


def test_nccl_between_ranks_of_one_device_is_refused():
    with pytest.raises(ValueError, match="2 ranks share cuda:1, and process_group_backend='nccl': NCCL communicates"):
        choose_backend("nccl", SECOND, 2)


def test_description():
    [line] = describe_sharing([FIRST, FIRST, SECOND], FIRST, "gloo_via_host")
    assert line.startswith("2 ranks share cuda:0; communication goes over the host (gloo)")
    assert describe_sharing([FIRST, SECOND], FIRST, "nccl") == []
    assert describe_sharing([torch.device("cpu")] * 2, torch.device("cpu"), "gloo") == []


def test_ranks_of_each_device():
    strategy = Hybrid3DStrategy(ranks_per_device=2)
    strategy.parallel_devices = [FIRST, SECOND]
    assert strategy.parallel_devices == [FIRST, FIRST, SECOND, SECOND] and strategy.num_processes == 4
    assert Hybrid3DStrategy(parallel_devices=[FIRST, FIRST]).num_processes == 2
    with pytest.raises(ValueError, match="ranks_per_device=0; use a whole number"):
        Hybrid3DStrategy(ranks_per_device=0)


SCRIPT = """
    import warnings
    warnings.simplefilter("ignore")
    import lightning_hybrid
    from lightning.pytorch import Trainer
    from models.tiny import Tiny, loader

    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False,
                      strategy=lightning_hybrid.Hybrid3DStrategy(pipeline_parallel_size=2, ranks_per_device=2))
    trainer.fit(Tiny(), loader(4))
    print(f"rank {trainer.global_rank} of {trainer.world_size}", flush=True)
"""


@pytest.mark.slow
def test_one_device_launches_two_ranks(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    code, output, _ = run([sys.executable, str(path)])
    assert code == 0, output
    assert "rank 0 of 2" in output and "rank 1 of 2" in output, output
