"""The first tests to run on GPUs: `python -m pytest -m gpu tests/gpu`. Docs: docs/gpus.md.

Fits on CUDA devices against plain Lightning on one of them. What needs two ranks runs over NCCL on two devices where
there are two, and on one that both ranks share, over NCCL and by way of the host.
"""

import dataclasses
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from harness.fits import Run, assert_parity, fit, fit_joined_batches, fit_reference, trainer_of
from harness.one_gpu import on_one_gpu, prepare
from harness.worlds.worlds_plugin import RankError
from lightning_hybrid import Hybrid3DStrategy
from models.cases import Samples, make
from models.hand_written import Layers
from models.mixtures import Looped, Mixtral
from models.moe_layers import Experts
from models.wide import GPT2OneHead

ACCELERATOR = "gpu"
ON = {"accelerator": ACCELERATOR}
CLIPPED = {**ON, "accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}


def needs(count):
    few = f"needs {count} CUDA device(s)"
    return [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason=few)]


# How two ranks get devices.
EACH_ITS_OWN = "a device each"
SHARED = {"one device": {}, "NCCL on one device": {"backend": "nccl"}}
EACH_WAY = [
    pytest.param(EACH_ITS_OWN, marks=needs(2)),
    *(pytest.param(way, marks=needs(1)) for way in SHARED),
]


def options_of(devices, ranks):
    """The strategy's options by which the ranks get their devices."""
    return {} if devices == EACH_ITS_OWN else on_one_gpu(ranks, **SHARED[devices])


def placed(run, devices):
    return dataclasses.replace(run, strategy={**run.strategy, **options_of(devices, run.world_size)})


class Measured(Layers):
    """Updates a metric, whose state is sent from the rank with the values to the others."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch, batch_idx=0):
        out = self(batch["x"])
        self.error(out, F.one_hot(batch["label"], 4).to(out))
        self.log("error", self.error, on_epoch=True)
        return F.cross_entropy(out, batch["label"])


class ToHost(Layers):
    """Moves values of the model to the host, stores and returns them there."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx=0):
        out = self(batch["x"])
        self.kept.append(out.detach().mean().cpu())
        return {"loss": F.cross_entropy(out, batch["label"]), "out": out.detach().cpu()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["out"].device.type == "cpu" and outputs["out"].shape[1] == 4
        assert all(kept.device.type == "cpu" and float(kept) == float(kept) for kept in self.kept)


def on_host(fitted):
    def moved(value):
        if isinstance(value, Tensor):
            return value.cpu()
        if isinstance(value, dict):
            return {name: moved(each) for name, each in value.items()}
        return [moved(each) for each in value] if isinstance(value, list) else value

    return dataclasses.replace(
        fitted, losses=moved(fitted.losses), grads=moved(fitted.grads), state=moved(fitted.state), plans={}
    )


def leave_gloo():
    dist.barrier()  # the others may be connecting still
    dist.destroy_process_group()


def on_gpu(how, run):
    """On a rank: the Trainer makes the process group itself, over NCCL unless ranks share a device."""
    leave_gloo()
    prepare(run.strategy)
    fitted = on_host(how(run))
    if dist.is_initialized() and ACCELERATOR == "gpu":
        chosen = run.strategy.get("process_group_backend") if dist.get_world_size() > 1 else None
        assert dist.get_backend() == (chosen or "nccl")
    return fitted


def check(worlds, run, *, how=fit, reference=fit_reference, tolerance=1e-8):
    [expected] = worlds.run(1, on_gpu, reference, run, timeout=300)
    found = worlds.run(run.world_size, on_gpu, how, run, timeout=300)
    assert_parity(found, expected, run, tolerance=tolerance)


def fit_plain(run):
    """Under the strategy with default options."""
    return fit(dataclasses.replace(run, strategy={}))


ONE = {
    "microbatches": Run("GPT2", trainer=CLIPPED),
    "two stages on one rank": Run("T5", strategy={"stages_per_rank": 2}, trainer=ON),
    "tensors on the host": Run(ToHost, strategy={"stages_per_rank": 2}, trainer=ON),
    "offload": Run("GPT2", strategy={"offload": "cpu"}, trainer=ON),
    "compiled": Run("Layers", strategy={"compile": "units"}, trainer=ON),
    "experts of transformers": Run(Mixtral, trainer=ON),
    "moe layers": Run(Experts, microbatches=1, trainer=ON),
}
DRAWN = {
    "recomputed": Run("Dropouts", strategy={"recompute": "full"}, trainer=ON),
    "partly recomputed": Run("GPT2Dropout", strategy={"recompute": "selective"}, trainer=ON),
    "stages": Run("Dropouts", strategy={"stages_per_rank": 2}, trainer=ON),
}
TWO = {
    "pp2, tied and validated": Run("GPT2", pp=2, validate=True, trainer=CLIPPED),
    "pp2 interleaved": Run("UNet", pp=2, strategy={"stages_per_rank": 2}, trainer=ON),
    "pp2, tensors on the host": Run(ToHost, pp=2, trainer=ON),
    "pp2, a metric": Run(Measured, pp=2, trainer=ON),
    "pp2, checked": Run("Layers", pp=2, strategy={"verify_first_step": True}, trainer=ON),
    "dp2": Run("GPT2", dp=2, trainer=CLIPPED),
    "tp2": Run("Llama", tp=2, trainer=ON),
    "tp2, positions": Run("GPT2", tp=2, sequence=True, trainer=ON),
    "cp2": Run("GPT2", cp=2, trainer=ON),
    "cp2, ring attention": Run(GPT2OneHead, cp=2, trainer=ON),
    "zero3": Run("GPT2", dp=2, strategy={"zero_stage": 3}, trainer=CLIPPED),
    "zero3 by layer": Run("Llama", dp=2, strategy=BY_LAYER, trainer=ON),
    "zero3 at rest on the host": Run("GPT2", dp=2, strategy={**BY_LAYER, "offload": "cpu"}, trainer=ON),
    "zero2 at rest on the host": Run("GPT2", dp=2, strategy={"zero_stage": 2, "offload": "cpu"}, trainer=CLIPPED),
    "zero3, parameters alone on the host": Run(
        "GPT2", dp=2, strategy={**BY_LAYER, "offload": {"parameters": "cpu"}}, trainer=CLIPPED
    ),
    "zero3, gradients alone on the host": Run(
        "GPT2", dp=2, strategy={**BY_LAYER, "offload": {"gradients": "cpu"}}, trainer=CLIPPED
    ),
    "zero3, all but states on the host": Run(
        "GPT2", dp=2, strategy={"zero_stage": 3, "offload": {"parameters": "cpu", "gradients": "cpu"}}, trainer=ON
    ),
    "zero3, selective by layer": Run("GPT2", dp=2, strategy={**BY_LAYER, "recompute": "selective"}, trainer=ON),
    "ep2": Run(Mixtral, dp=2, ep=2, trainer=ON),
    "ep2, a list in chunks": Run(Looped, dp=2, ep=2, strategy={"expert_chunks": 2}, trainer=ON),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(1)) for name in ONE])
def test_one_device(worlds, name):
    check(worlds, ONE[name])


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(1)) for name in DRAWN])
def test_device_draws_are_keyed(worlds, name):
    check(worlds, DRAWN[name], reference=fit_plain)


@pytest.mark.parametrize("precision", [pytest.param(name, marks=needs(1)) for name in ("16-mixed", "bf16-mixed")])
def test_mixed_precision(worlds, precision):
    run = Run("GPT2", dtype=torch.float32, microbatches=1, trainer={**ON, "precision": precision})
    for case in (run, dataclasses.replace(run, strategy={"stages_per_rank": 2})):
        check(worlds, case, tolerance=2e-2)


@pytest.mark.parametrize("devices", EACH_WAY)
@pytest.mark.parametrize("name", TWO)
def test_two_ranks(worlds, name, devices):
    check(worlds, placed(TWO[name], devices))


@pytest.mark.parametrize("devices", EACH_WAY)
def test_mixed_precision_over_stages(worlds, devices):
    run = Run("GPT2", pp=2, dtype=torch.float32, microbatches=2, trainer={**ON, "precision": "16-mixed"})
    check(worlds, placed(run, devices), reference=fit_joined_batches, tolerance=2e-2)


def fit_twice(folder, strategy):
    """On a rank: two epochs at once, and one after the other through a checkpoint; the parameters after each."""
    leave_gloo()
    prepare(strategy)
    found = []
    for epochs, source in ((2, None), (1, None), (2, f"{folder}/half.ckpt")):
        module = make("GPT2")
        size = math.prod(value for name, value in strategy.items() if name.endswith("_parallel_size"))
        options = {"max_epochs": epochs, "accelerator": ACCELERATOR}
        trainer = trainer_of(size, Hybrid3DStrategy(**strategy), [], **options)
        trainer.fit(module, DataLoader(Samples(module.kind, 8), batch_size=4), ckpt_path=source)
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/half.ckpt")
        found.append({name: value.detach().cpu() for name, value in module.state_dict().items()})
    return found


RESUMED = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "zero3": {"data_parallel_size": 2, "zero_stage": 3, "offload": "cpu"},
}


@pytest.mark.parametrize("devices", EACH_WAY)
@pytest.mark.parametrize("strategy", RESUMED.values(), ids=RESUMED)
def test_resume_over_two_ranks(worlds, tmp_path, strategy, devices):
    check_resumed(worlds.run(2, fit_twice, str(tmp_path), {**strategy, **options_of(devices, 2)}, timeout=300))


@pytest.mark.parametrize("strategy", [pytest.param({"offload": "cpu"}, marks=needs(1), id="offload")])
def test_resume_on_one_device(worlds, tmp_path, strategy):
    check_resumed(worlds.run(1, fit_twice, str(tmp_path), strategy, timeout=300))


def check_resumed(found):
    for uninterrupted, _, resumed in found:
        for name, value in uninterrupted.items():
            torch.testing.assert_close(resumed[name], value, rtol=1e-8, atol=1e-10)


class Raises(Layers):
    """Fails in the second batch on one rank."""

    def training_step(self, batch, batch_idx=0):
        if batch_idx == 1 and self.trainer.strategy.mesh.rank == 1:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", EACH_WAY)
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"dp": 2}], ids=["pp2", "dp2"])
def test_failing_rank_ends_the_fit(worlds, sizes, devices):
    run = Run(Raises, trainer=ON, strategy={"timeout": timedelta(seconds=60)}, **sizes)
    with pytest.raises(RankError, match="on purpose"):
        worlds.run(2, on_gpu, fit, placed(run, devices), timeout=120, grace=70)
