"""Processes that torchrun or SLURM starts: their number is that of the Trainer, or an error before they meet."""

import pytest

from harness.trainer_runs import trainer_of
from lightning_hybrid import Hybrid3DStrategy

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "0"}
SLURM = {
    **{"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "node1"},
}


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM], ids=["torchrun", "SLURM"])
@pytest.mark.parametrize("devices", [2, 8])
def test_other_numbers_of_processes_are_refused(monkeypatch, variables, devices):
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning.fabric.plugins.environments.slurm._is_srun_used", lambda: True)
    trainer = trainer_of(strategy=Hybrid3DStrategy(), devices=devices)
    with pytest.raises(ValueError, match=f"`devices={devices}`"):
        trainer.strategy.setup_environment()
