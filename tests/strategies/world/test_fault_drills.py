"""Ranks killed at random points, in a loop with restarts: the run is bitwise equal to an undisturbed one."""

import gc
import os
import sys
import textwrap

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from harness.launched_jobs import run, torchrun
from lightning_hybrid import Hybrid3DStrategy
from models.cases import Samples, make

SCRIPT = """
    import os, random, signal, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    import lightning_hybrid
    from lightning.pytorch import Callback, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from models.tiny import Tiny, loader

    FOLDER, FAULTS = sys.argv[1], int(sys.argv[2])
    RANK = int(os.environ["RANK"])  # in steps it is the replica's
    ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    PLACES = ["forward", "communication", "optimizer", "save"]
    draw = random.Random(1000 + ATTEMPT)
    PLACE, VICTIM = PLACES[ATTEMPT % 4], draw.randrange(2)
    if PLACE == "save":
        VICTIM = 0 if {one_writer} else VICTIM

    def die(place, trainer=None):
        "Once, in the second step of this attempt or later."
        if ATTEMPT < FAULTS and place == PLACE and RANK == VICTIM and Drill.steps >= 2:
            os.kill(os.getpid(), signal.SIGKILL)

    class Drill(Callback):
        steps = 0

        def on_train_batch_start(self, *_):
            Drill.steps += 1

    def faulty(owner, name, place):
        original = getattr(owner, name)

        def replaced(*args, **kwargs):
            die(place)
            return original(*args, **kwargs)

        setattr(owner, name, replaced)

    class Model(Tiny):
        def training_step(self, batch, batch_idx):
            die("forward")
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            die("optimizer")

    from lightning_hybrid.pipeline.runtime.transport import HostTransport
    from lightning_hybrid.zero.group import ParameterGroup
    faulty(HostTransport, "send", "communication")
    faulty(ParameterGroup, "launch_reduce", "communication")
    {save_fault}

    seed_everything(3, verbose=False)
    model = Model()
    saving = ModelCheckpoint(
        FOLDER, filename="{{step}}", every_n_epochs=1, save_on_train_epoch_end=True, save_last=True
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=6, logger=False, callbacks=[Drill(), saving],
        strategy=lightning_hybrid.Hybrid3DStrategy(**{options}), enable_progress_bar=False, enable_model_summary=False,
    )
    last = os.path.exists(FOLDER) and any(name.startswith("last") for name in os.listdir(FOLDER))
    # Saved after each epoch of one batch: where a loader without a state stands within one, no checkpoint knows.
    trainer.fit(model, loader({batch_size}), ckpt_path="last" if last else None)
    if RANK == 0:
        torch.save(model.state_dict(), f"{{FOLDER}}.pt")
        print("attempts", ATTEMPT + 1, "steps", trainer.global_step, flush=True)
"""
SINGLE = 'import lightning.fabric.utilities.cloud_io as io; faulty(io.torch, "save", "save")'
FOLDERS = 'import lightning_hybrid.checkpoint.write as writing; faulty(writing, "_write_own", "save")'
LAYOUTS = {
    "zero3": {"zero_stage": 3},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero3, folders": {"zero_stage": 3, "save_distributed_checkpoint": True},
    "pp2, folders": {"pipeline_parallel_size": 2, "num_microbatches": 2, "save_distributed_checkpoint": True},
}


def drill(tmp_path, name, options, faults, *, save_fault=SINGLE, one_writer=True):
    script = tmp_path / f"{name}.py"
    text = textwrap.dedent(SCRIPT).format(
        options=options,
        save_fault=save_fault,
        one_writer=one_writer,
        batch_size=16 if "pipeline_parallel_size" in options else 8,
    )
    script.write_text(text)
    folder = tmp_path / name
    common = ("--nproc-per-node=2", "--standalone", f"--max-restarts={faults}", "--monitor-interval=0.2")
    code, output, _ = run([*torchrun(str(script), *common), str(folder), str(faults)], timeout=600)
    assert code == 0, output
    assert f"attempts {faults + 1} " in output, output
    return torch.load(tmp_path / f"{name}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_four_points_and_restarted(tmp_path, monkeypatch, layout):
    """In a forward, in a message, after the optimizer's step and during a save."""
    # Otherwise torchrun's restarts share a store, with the addresses of killed ranks.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    fault = {"save_fault": FOLDERS, "one_writer": False} if "folders" in layout else {}
    undisturbed = drill(tmp_path, "calm", LAYOUTS[layout], 0, **fault)
    drilled = drill(tmp_path, "drilled", LAYOUTS[layout], 4, **fault)
    assert undisturbed.keys() == drilled.keys()
    assert all(torch.equal(value, drilled[name]) for name, value in undisturbed.items())


class Footprint(Callback):
    """Memory and open files of a rank after some steps."""

    def __init__(self):
        self.recorded = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 50 == 0:
            gc.collect()
            with open("/proc/self/statm") as pages:
                resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")
            self.recorded.append((resident, len(os.listdir("/proc/self/fd"))))


def footprint(options):
    counts, module = Footprint(), make("Layers")
    trainer = trainer_of(2, Hybrid3DStrategy(**options, num_microbatches=2), [counts])
    trainer.fit(module, DataLoader(Samples(module.kind, 4000), batch_size=4))
    return counts.recorded


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [{"zero_stage": 3, "reshard_after_forward": True}, {"zero_stage": 3}, {"zero_stage": 1}],
    ids=["zero3 by layer", "zero3", "zero1"],
)
def test_memory_and_open_files_are_constant_over_500_steps(worlds, options):
    for recorded in worlds.run(2, footprint, options, timeout=300):
        (after, files), *_, (last, last_files) = recorded[1:]
        assert last_files == files, recorded
        assert last - after < 4 * 2**20, f"{(last - after) / 2**20:.1f} MiB more after 500 steps than after 100"
