"""Real launches: scripts started by Lightning and by torchrun, and jobs of which one rank fails."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from harness.launched_jobs import TESTS, run, start, torchrun
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import HybridError, LayoutError
from models.tiny import Tiny, loader

FIT = """
    import sys, warnings
    warnings.simplefilter("ignore")
    from harness.worlds.hidden_packages import OPTIONAL, hide
    hide({{*OPTIONAL, "pytorch_lightning", "lightning_fabric"}})
    import lightning_hybrid
    import torch
    from lightning.pytorch import Trainer
    from models.tiny import Tiny, loader

    class Model(Tiny):
        def training_step(self, batch, batch_idx):
            {fault}
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True)
            return loss

    trainer = Trainer(accelerator="cpu", devices={devices}, num_nodes={nodes}, max_epochs=1, logger=False,
                      strategy=lightning_hybrid.Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2),
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), loader(4))
    loss = float(trainer.callback_metrics["loss"])
    print(f"rank {{trainer.global_rank}} of {{trainer.world_size}}: {{loss:.6f}}", flush=True)
"""


def write_script(folder, *, devices=2, nodes=1, fault="pass"):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(FIT).format(devices=devices, nodes=nodes, fault=fault))
    return str(path)


def losses_of(output):
    return {int(rank): loss for rank, loss in re.findall(r"rank (\d+) of \d+: ([\d.]+)", output)}


def test_lightning_launches_the_script_once_per_device(tmp_path):
    code, output, _ = run([sys.executable, write_script(tmp_path)])
    assert code == 0, output
    losses = losses_of(output)
    assert set(losses) == {0, 1} and losses[0] == losses[1], output
    assert "stage" in output and "pipeline 2" in output


def two_nodes(script, tmp_path, per_node=1):
    port = free_port()
    common = ("--nnodes=2", f"--nproc-per-node={per_node}", "--master-addr=127.0.0.1", f"--master-port={port}")
    other = start(torchrun(script, *common, "--node-rank=1"))
    try:
        code, output, seconds = run(torchrun(script, *common, "--node-rank=0"))
        more, _ = other.communicate(timeout=60)
    finally:
        if other.poll() is None:
            os.killpg(other.pid, 9)
    return code, other.returncode, output, more, seconds


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow  # ranks of every other test get their world as from torchrun
def test_torchrun_runs_two_nodes_on_loopback(tmp_path):
    code, other_code, output, more, _ = two_nodes(write_script(tmp_path, devices=1, nodes=2), tmp_path)
    assert (code, other_code) == (0, 0), output + more
    losses = losses_of(output + more)
    assert set(losses) == {0, 1} and losses[0] == losses[1]


ON_RANK_1 = "if batch_idx == 1 and self.trainer.strategy.mesh.rank == 1: "
RAISES = ON_RANK_1 + 'raise ZeroDivisionError("on purpose")'
DIES = ON_RANK_1 + "import os; os._exit(3)"
KILLED = ON_RANK_1 + "import os; os.kill(os.getpid(), 9)"
SIGTERM = ON_RANK_1 + "import os; os.kill(os.getpid(), 15)"


def command_of(launcher, script):
    return (
        torchrun(script, "--nproc-per-node=2", f"--master-port={free_port()}")
        if launcher == "torchrun"
        else [
            sys.executable,
            script,
        ]
    )


FAULTS = {"raises": RAISES, "dies": DIES, "killed": KILLED}
EACH_FAULT = [
    pytest.param(
        fault,
        launcher,
        marks=[] if (name, launcher) == ("killed", "popen") else [pytest.mark.slow],
        id=f"{name}-{launcher}",
    )
    for name, fault in FAULTS.items()
    for launcher in ("popen", "torchrun")
]


# Lightning kills the first rank when it sees that another one has failed, at most five seconds later; here at once.
IMPATIENT = """
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
_ChildProcessObserver.__init__.__defaults__ = (0.01,)
"""


@pytest.mark.parametrize(("fault", "launcher"), EACH_FAULT)
def test_one_failing_rank_ends_the_job(tmp_path, fault, launcher):
    script = Path(write_script(tmp_path, fault=fault))
    script.write_text(IMPATIENT + script.read_text())
    code, output, _ = run(command_of(launcher, str(script)))
    assert code != 0
    if fault == RAISES:
        assert "rank 0 stopped: rank 1 failed: ZeroDivisionError: on purpose\n" in output
        assert "on pipeline rank 1, stage 1 of 2, action" in output and "training_step" in output
    else:
        died = "another rank of the job has died silently (killed, or out of memory)"
        line = r"rank 0 \(pipeline rank 0 of 2\) in stage 0 of 2.* of training_step .*had to stop: "
        assert re.search(line + re.escape(died), " ".join(output.split())), output


@pytest.mark.parametrize("method", ["popen", "fork"])
def test_missing_checkpoint_is_found_before_ranks_start(tmp_path, method):
    (tmp_path / "version_0/checkpoints").mkdir(parents=True)
    saved = tmp_path / "version_0/checkpoints/last.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.0"}, saved)
    saved.with_name("empty.ckpt").touch()  # not listed
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, start_method=method)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    with pytest.raises(
        FileNotFoundError,
        match=f"no such checkpoint; the folder .*/version_1/checkpoints does.*; set it .*: {os.path.relpath(saved)}$",
    ):
        trainer.fit(Tiny(), loader(4), ckpt_path=tmp_path / "version_1/checkpoints/last.ckpt")
    assert not trainer.strategy.launcher.procs
    with pytest.raises(FileNotFoundError, match=f"; {saved.parent}/empty has no other$"):
        (saved.parent / "empty").mkdir()
        trainer.validate(Tiny(), loader(4), ckpt_path=str(saved.parent / "empty/other.ckpt"))
    with pytest.raises(FileNotFoundError, match=f"; the folder {saved.parent}/empty/runs/a does not exist$"):
        trainer.validate(Tiny(), loader(4), ckpt_path=str(saved.parent / "empty/runs/a/other.ckpt"))


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (3, {}, "2 ranks but the world has 3; set pipeline_parallel_size=1 or 3, or devices=2 or 4"),
        (2, {"pipeline_cuts": ["nosuch"]}, "but Tiny has no module of that name; .*; there are layers.*layers.1"),
        (
            2,
            {"pipeline_cuts": ["layers.1", "layers.2"]},
            "names 2 modules, but 2 stages need 1: .* change pipeline_parallel_size or stages_per_rank for 3 stages",
        ),
        (2, {"pipeline_cuts": ["layers.0"]}, "'layers.0', with which the first stage begins; name"),
        (
            2,
            {"pipeline_cuts": ["layers.2", "layers.1", "layers.3"], "stages_per_rank": 2},
            "of training_step, which uses layers.1 before layers.2 before layers.3; name each once, in this order",
        ),
        (2, {"pipeline_cuts": ["layer.3"]}, "'layer.3', but Tiny has no module of .*; did you mean 'layers.3'"),
        (
            2,
            {"stages_per_rank": 8},
            "stages_per_rank=8 makes 16 stages, but the step has only . layers with parameters",
        ),
        (
            2,
            {"zero_stage": 3},
            "2 devices with pipeline_parallel_size=2 make 1 replica; use 4 devices, or set zero_stage=0",
        ),
        (4, {"zero_stage": 1, "shard_size": 1}, "shard_size=1 makes shards of 1 replica of 2; leave shard_size out"),
        (2, {"num_microbatches": 9}, "num_microbatches=9 but the batch has only 4 samples"),
    ],
)
@pytest.mark.parametrize("method", ["popen", "fork"])
def test_what_would_end_all_ranks_is_found_before_they_start(devices, options, words, method):
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, start_method=method, **options)
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(HybridError, match=words):
        trainer.fit(Tiny(), loader(4))
    assert not trainer.strategy.launcher.procs


@pytest.mark.parametrize(
    ("devices", "widths", "advice"),
    [
        (3, [3, 1], "[2, 1], or devices=4"),
        (6, [3, 1], "[2, 1], or devices=4 or 8"),
        (5, [2, 2, 2], "[2, 2, 1], or "),
    ],
)
def test_widths_that_do_not_fill_the_devices_name_others(devices, widths, advice):
    strategy = Hybrid3DStrategy(stage_widths=widths)
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(LayoutError, match=re.escape(f"but the world has {devices}; set stage_widths={advice}")):
        trainer.fit(Tiny(), loader(4))


def test_notebook_is_refused(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(RuntimeError, match=r"start_method='fork'.*strategy='hybrid3d_notebook'"):
        Trainer(accelerator="cpu", devices=2, strategy=Hybrid3DStrategy(pipeline_parallel_size=2))
    Trainer(accelerator="cpu", devices=2, strategy=Hybrid3DStrategy(start_method="fork"))


@pytest.mark.slow
def test_rank_that_catches_its_error_does_not_block_the_others(tmp_path):
    script = Path(write_script(tmp_path, fault=RAISES))
    text = script.read_text()
    fit = "trainer.fit(Model(), loader(4))\n"
    lingering = (
        "try:\n    trainer.fit(Model(), loader(4))\nexcept ZeroDivisionError:\n    __import__('time').sleep(3600)\n"
    )
    assert text.count(fit) == 1
    script.write_text(text.replace(fit, lingering))
    # The rank that lingers is ended by torchrun, once the other one has.
    code, output, seconds = run(command_of("torchrun", str(script)))
    assert code != 0 and seconds < 90, output
    assert re.search(r"rank 0 stopped: rank 1 failed: ZeroDivisionError: on purpose", output), output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["popen", "torchrun"])
def test_sigterm_to_one_rank_ends_the_job(tmp_path, launcher):
    script = Path(write_script(tmp_path, fault=SIGTERM))
    # After fit comes what only a run to the end may print.
    script.write_text(script.read_text().replace("loader(4)", "loader(4, 400)"))
    code, output, seconds = run(command_of(launcher, str(script)))
    assert code == 0 and seconds < 90, output
    assert not losses_of(output), output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["popen", "torchrun"])
def test_sigterm_to_a_job_leaves_no_process(tmp_path, launcher):
    script = write_script(tmp_path, fault='print(f"batch {batch_idx}", flush=True); __import__("time").sleep(0.05)')
    text = Path(script).read_text().replace("loader(4)", "loader(4, 4000)")
    Path(script).write_text(text)
    process = start(command_of(launcher, script))
    try:
        for line in process.stdout:
            if line.startswith("batch 3"):
                break
        process.terminate()
        # Its output ends when the last process that writes to it has.
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert not losses_of(output), output


WORKERS = """
    import lightning_hybrid
    import torch
    from lightning.pytorch import Trainer, seed_everything
    from models.augmented import Augmented, SeesNoise
    from torch.utils.data import DataLoader

    seed_everything(7, workers=True, verbose=False)
    model = SeesNoise()
    trainer = Trainer(accelerator="cpu", devices=4, max_epochs=2, logger=False, enable_checkpointing=False,
                      strategy=lightning_hybrid.Hybrid3DStrategy(pipeline_parallel_size=2),
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(Augmented(), batch_size=8, num_workers=2))
    print(f"rank {trainer.global_rank} of 4: {float(torch.tensor(model.noise).abs().sum()):.6f}", flush=True)
"""


@pytest.mark.slow
def test_worker_augmentation_is_equal_within_a_replica(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n" + textwrap.dedent(WORKERS))
    code, output, _ = run([sys.executable, str(path)])
    assert code == 0, output
    noise = losses_of(output)
    assert noise[0] == noise[2] and noise[1] == noise[3], "ranks of one replica see the same augmentation"
    assert noise[0] != noise[1], "replicas see different augmentation"


@pytest.mark.slow
def test_forked_ranks_as_in_a_notebook(tmp_path):
    path = Path(write_script(tmp_path))
    text = path.read_text().replace("num_microbatches=2)", "num_microbatches=2, start_method='fork')")
    path.write_text(text.replace("num_nodes=1, ", ""))
    code, output, _ = run([sys.executable, str(path)])
    assert code == 0, output
    assert "Starting with 2 processes" in output, output
    assert "stage  units" in output, output


def test_forks_that_lose_the_first_rank_print_no_native_frames(tmp_path):
    path = Path(write_script(tmp_path, fault=RAISES.replace("mesh.rank == 1", "mesh.rank == 0")))
    path.write_text(path.read_text().replace("num_microbatches=2)", "num_microbatches=2, start_method='fork')"))
    path.write_text(path.read_text().replace("num_nodes=1, ", ""))
    code, output, _ = run([sys.executable, str(path)])
    assert code != 0 and output.count("ZeroDivisionError: on purpose") == 1, output
    assert "raised on rank 0:" in output and "frame #" not in output and "recvVector" not in output, output


def test_save_on_one_rank_after_the_fit_says_what_to_do(tmp_path):
    path = Path(write_script(tmp_path))
    path.write_text(path.read_text() + f"if trainer.global_rank == 1: trainer.save_checkpoint({str(tmp_path)!r})\n")
    _, output, _ = run([sys.executable, str(path)])
    assert "NotOnAllRanks: trainer.save_checkpoint" in output and "on rank 1 needs all 2 ranks" in output, output
    assert "make the same calls on all ranks" in output and "Connection closed" not in output, output


FORKED = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import pytest
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_hybrid import Hybrid3DStrategy
    from models.tiny import Tiny, loader

    class Model(Tiny):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    def fit(**options):
        trainer = Trainer(accelerator="cpu", devices=2, max_epochs=2, log_every_n_steps=1,
                          strategy=Hybrid3DStrategy(pipeline_parallel_size=2, start_method="fork", **options),
                          callbacks=[ModelCheckpoint(monitor="loss", save_last=True)],
                          enable_progress_bar=False, enable_model_summary=False)
        model = Model()
        trainer.fit(model, loader(4))
        return trainer, model

    trainer, model = fit()
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert trainer.logged_metrics["loss"] == trainer.callback_metrics["loss"] > 0
    saved = trainer.checkpoint_callback
    assert saved.best_model_path and saved.best_model_score > 0 and saved.last_model_path.endswith("last.ckpt")
    resumed = Trainer(accelerator="cpu", devices=1, max_epochs=3, enable_progress_bar=False, logger=False)
    resumed.fit(Model(), loader(4), ckpt_path=saved.last_model_path)
    assert resumed.global_step == 12
    for read in ("run", "mesh"):
        with pytest.raises(RuntimeError, match=f"there is no {read}: the forked processes .* have ended"):
            getattr(trainer.strategy, read)
    trainer.save_checkpoint("weights.ckpt", weights_only=True)  # without a warning
    with pytest.warns(UserWarning, match="after.ckpt has the weights and no optimizer states"):
        trainer.save_checkpoint("after.ckpt")
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model = Model.load_from_checkpoint("after.ckpt")
    assert all((value == trained[name]).all() for name, value in model.state_dict().items())
    trainer, _ = fit(save_distributed_checkpoint=True)
    with pytest.raises(RuntimeError, match="there is no rank to write a folder"):
        trainer.save_checkpoint("folder")
    print("all there")
"""


@pytest.mark.slow
def test_what_a_notebook_knows_after_its_forked_ranks_have_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FORKED))
    code, output, _ = run([sys.executable, str(path)])
    assert code == 0 and "all there" in output, output


@pytest.mark.slow
def test_slurm_gives_each_task_its_rank(tmp_path):
    script, port = write_script(tmp_path), free_port()
    tasks = []
    for rank in range(2):
        slurm = {"JOB_NAME": "train", "NTASKS": 2, "NTASKS_PER_NODE": 2, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
        variables = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        variables |= {"SLURM_JOB_ID": "17", "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1"}
        variables["MASTER_PORT"] = str(port)
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, script]
        tasks.append(start(command))
    outputs = []
    for task in tasks:
        try:
            outputs.append(task.communicate(timeout=100)[0])
        except subprocess.TimeoutExpired:
            os.killpg(task.pid, 9)
            outputs.append(task.communicate()[0])
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(outputs)
    losses = losses_of("".join(outputs))
    assert set(losses) == {0, 1} and losses[0] == losses[1]


@pytest.mark.parametrize(("option", "words"), [(["-c"], "python -c"), (["-"], "standard input")])
def test_a_program_without_a_file_is_refused(option, words):
    program = "from models.regression import *; from harness.trainer_runs import *; trainer_of(2).fit(Regressor())"
    given = {"args": [sys.executable, *option, program]} if option == ["-c"] else {"args": [sys.executable, "-"]}
    text = None if option == ["-c"] else program
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(**given, input=text, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert run.returncode == 1
    assert f"this program came from {words}; save it as a .py file" in run.stderr, run.stderr


def test_a_port_in_use_ends_all_ranks(tmp_path):
    """The output ends when the last process that writes to it has."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["env", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", sys.executable, write_script(tmp_path)]
        code, output, _ = run(command)
    assert code == 1 and f"port {port} is in use; set MASTER_PORT to a free one" in output, output
