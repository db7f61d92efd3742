"""State of a Trainer with hybrid3d before any process starts: as with Lightning's own strategies."""

import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from harness.launched_jobs import environment
from harness.one_device import plain, with_both_strategies
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from models.small import Small

ATTRIBUTES = ["world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_devices", "device_ids"]
ATTRIBUTES += ["is_global_zero", "estimated_stepping_batches", "num_training_batches", "received_sigterm"]
OF_THE_STRATEGY = ["root_device", "world_size", "global_rank", "local_rank", "is_global_zero", "optimizers", "model"]
OF_THE_STRATEGY += ["num_nodes", "num_processes", "node_rank", "distributed_sampler_kwargs", "process_group_backend"]


def about_to_fit(trainer):
    """The Trainer in the state of `fit` at its first query."""
    module = Small()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    return trainer


def answers(trainer, of_the_strategy=OF_THE_STRATEGY):
    found = {name: getattr(trainer, name) for name in ATTRIBUTES}
    found |= {f"strategy.{name}": getattr(trainer.strategy, name) for name in of_the_strategy}
    strategy = trainer.strategy
    calls = [strategy.broadcast(5), strategy.barrier(), plain(strategy.batch_to_device(torch.ones(2)))]
    calls += [plain(strategy.reduce(torch.ones(2))), strategy.process_dataloader([1])]
    found["calls"] = calls
    about_to_fit(trainer)
    return {**found, "batches": (trainer.estimated_stepping_batches, trainer.num_training_batches)}


def state_outside_a_run(trainer):
    kept = ["root_device", "world_size", "global_rank", "local_rank", "is_global_zero", "optimizers", "model"]
    run = trainer()
    decisions = run.strategy.reduce_boolean_decision(True), run.strategy.reduce_boolean_decision(False, all=False)
    gathered = plain(run.strategy.all_gather(torch.ones(2)))
    return answers(run, kept), decisions, gathered, run._accelerator_connector.is_distributed


def test_one_device_matches_the_plain_trainer(worlds):
    [[expected, actual]] = worlds.run(1, with_both_strategies, state_outside_a_run)
    assert not isinstance(expected, str), expected
    assert actual == expected


def several(strategy, devices, num_nodes=1):
    ignore_warnings()
    options = {"accelerator": "cpu", "devices": devices, "num_nodes": num_nodes, "logger": False, "max_epochs": 2}
    return Trainer(strategy=strategy, enable_checkpointing=False, plugins=[LightningEnvironment()], **options)


def answers_of(kind, devices, num_nodes):
    return answers(several(kind(), devices, num_nodes))


@pytest.mark.parametrize(("devices", "num_nodes"), [(2, 1), (4, 1), (2, 2)])
def test_replicas_match_ddp(worlds, devices, num_nodes):
    [expected] = worlds.run(1, answers_of, DDPStrategy, devices, num_nodes)
    assert worlds.run(1, answers_of, Hybrid3DStrategy, devices, num_nodes) == [expected]


def answers_of_stages():
    trainer = several(Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2), 4)
    found = trainer.world_size, trainer.strategy.layout.sizes, trainer.distributed_sampler_kwargs
    is_distributed = trainer.strategy.is_distributed, several("hybrid3d", 1).strategy.is_distributed
    stages = several(Hybrid3DStrategy(pipeline_parallel_size=2), 2)
    about_to_fit(trainer)
    return found, is_distributed, stages.strategy.is_distributed, trainer.estimated_stepping_batches


def test_ranks_of_one_replica_count_once(worlds):
    [(found, is_distributed, of_stages, steps)] = worlds.run(1, answers_of_stages)
    world_size, sizes, sampler = found
    assert (world_size, sizes) == (4, (2, 2, 1, 1, 1)) and sampler == {"num_replicas": 2, "rank": 0}
    assert is_distributed == (True, False) and not of_stages
    assert steps == 2 * 16 // 2 // 2  # epochs, samples, batch size, replicas


def saved_before(folder):
    trainer = about_to_fit(several(Hybrid3DStrategy(pipeline_parallel_size=2), 2))
    trainer.save_checkpoint(folder / "before.ckpt")
    Small.load_from_checkpoint(folder / "before.ckpt")
    return plain(torch.load(folder / "before.ckpt", weights_only=True)["state_dict"]), plain(Small().state_dict())


def test_checkpoint_before_fit(worlds, tmp_path):
    [(saved, expected)] = worlds.run(1, saved_before, tmp_path)
    assert saved == expected


def test_misfit_sizes_are_reported_by_the_layout():
    trainer = several(Hybrid3DStrategy(pipeline_parallel_size=3), 4)
    with pytest.raises(ValueError, match="3"):
        _ = trainer.strategy.layout
    with pytest.raises(RuntimeError, match="depends on the number of devices"):
        _ = Hybrid3DStrategy().layout


# -- processes --------------------------------------------------------------------------------------------------------

SCRIPT = """
    import os, sys, threading, warnings
    warnings.simplefilter("ignore")
    import harness.worlds.light_torchmetrics  # loads in half the time
    import lightning_hybrid
    import torch
    from lightning.pytorch import Trainer
    from models.small import Small

    def around():
        return dict(os.environ), torch.get_num_threads(), threading.active_count()

    before = around()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=int(sys.argv[1]), max_epochs=1, strategy="hybrid3d", **quiet)
    trainer.fit(Small())
    environment = type(trainer._accelerator_connector.cluster_environment).__name__
    after = around()
    print(sorted(after[0].items() ^ before[0].items()), after[1] == before[1], trainer.strategy.launcher)
    print(environment, trainer.global_rank, trainer.world_size, trainer.global_step)
"""


def run_script(folder, devices, **variables):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    settings = {**environment(), **variables}
    del settings["OMP_NUM_THREADS"]
    command = [sys.executable, str(path), str(devices)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)


def test_one_device_leaves_the_process_unchanged(tmp_path):
    done = run_script(tmp_path, 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[] True None", "LightningEnvironment 0 1 8"]


def test_one_device_needs_no_slurm_variables(tmp_path):
    done = run_script(tmp_path, 1, SLURM_JOB_NAME="train", SLURM_NTASKS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "SLURMEnvironment 0 1 8"


def test_several_devices_name_the_missing_slurm_variable(tmp_path):
    done = run_script(tmp_path, 2, SLURM_JOB_NAME="train", SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2")
    assert done.returncode != 0
    assert "SLURMEnvironment finds no variable 'SLURM_NODEID'" in done.stderr, done.stderr


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"process_group_backend": "glue"}, ValueError, "process_group_backend='glue' is unknown; use 'nccl', 'gloo'"),
        ({"process_group_backend": ""}, ValueError, "process_group_backend='' is unknown"),
        ({"process_group_backend": "cpu:gloo,cuda:mccl"}, ValueError, "'cpu:gloo,cuda:mccl' is unknown"),
        ({"process_group_backend": 2}, TypeError, "process_group_backend=2; use 'nccl', 'gloo' or None"),
        ({"timeout": 30}, TypeError, "timeout=30; use datetime.timedelta"),
        ({"timeout": timedelta(0)}, ValueError, "is not positive"),
        ({"timeout": timedelta(seconds=-1)}, ValueError, "use more than 0 seconds"),
        ({"start_method": "spawn"}, ValueError, "start_method='spawn' is unknown; use 'popen'"),
        ({"start_method": None}, ValueError, "start_method=None is unknown"),
    ],
)
def test_process_options_are_validated_by_the_constructor(options, error, message):
    with pytest.raises(error, match=message):
        Hybrid3DStrategy(**options)


def test_valid_process_options():
    for backend in (None, "gloo", "nccl", "cpu:gloo,cuda:nccl"):
        Hybrid3DStrategy(process_group_backend=backend, timeout=None, start_method="fork")
