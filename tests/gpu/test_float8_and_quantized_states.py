"""Float8 products of a GPU against emulated ones; quantized optimizer states on it, with torchao's compiler."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.precision import Float8
from models.cases import Samples, make
from models.hand_written import Layers
from models.quantized_optimizers import MODULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.world(1, timeout=600),  # compilers take minutes
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao"),
]


def leave_gloo():
    dist.destroy_process_group()  # the Trainer makes its own


class Losses(Layers):
    def __init__(self):
        super().__init__()
        self.losses, self.kinds = [], set()

    def training_step(self, batch, batch_idx=0):
        loss = self.loss(batch)
        self.losses.append(loss.detach().float())
        self.kinds |= {type(m).__name__ for m in self.modules()}
        return loss


def losses_of(precision, float8, **options):
    module = make(Losses, torch.float32)
    plugins = [HybridPrecision(precision, float8=float8)]
    trainer = trainer_of(1, Hybrid3DStrategy(**options), [], accelerator="gpu", plugins=plugins)
    # 24 samples: the inner dimension of a weight's gradient is no multiple of 16.
    trainer.fit(module, DataLoader(Samples(module.kind, 72, torch.float32), batch_size=24))
    assert ("Float8Linear" in module.kinds) is (float8 is not None)
    return torch.stack(module.losses)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_products_are_those_of_the_emulation(precision, recipe):
    """Products are summed in another order; both differ from those of bfloat16."""
    leave_gloo()
    found = losses_of(precision, Float8(recipe=recipe))
    torch.testing.assert_close(found, losses_of(precision, Float8(recipe=recipe, emulate=True)), rtol=2e-2, atol=0)


@pytest.mark.parametrize("options", [{"compile": "units"}, {"stages_per_rank": 2, "num_microbatches": 2}], ids=str)
def test_layers_compiled_and_in_stages(options):
    leave_gloo()
    found = losses_of("bf16-mixed", Float8(), **options)
    assert found.isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_steps_compiled_on_the_device(name):
    if name == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    leave_gloo()
    states = []
    for strategy in (None, Hybrid3DStrategy(num_microbatches=2)):
        module = make(MODULES[name], torch.float32)
        loader = DataLoader(Samples(module.kind, 12, torch.float32), batch_size=4)
        trainer_of(1, strategy, [], accelerator="gpu").fit(module, loader, loader)
        states.append({key: value.cpu() for key, value in module.state_dict().items()})
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
