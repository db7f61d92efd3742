"""HybridPrecision equals Lightning's plugin in one process, with one loss scale and one gradient norm over a mesh."""

import copy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.precision import HybridPrecision, MeshGradScaler

NAMES = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]
two_ranks = pytest.mark.world(2)


def parameters_with_gradients(num, dtype=torch.float64):
    """The same on every rank: parameters of a full model with their gradients."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, index + 2, dtype=dtype)) for index in range(num)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def two_stages(precision="32-true", owned=None):
    """A plugin over a pipeline of two stages; by default a rank owns everything."""
    mesh = Mesh.build(ParallelLayout(pipeline_parallel_size=2), "cpu")
    plugin = HybridPrecision(precision, device="cpu")
    everything = type("Everything", (set,), {"__contains__": lambda *_: True})()
    plugin.connect_mesh(mesh, lambda: everything if owned is None else owned)
    return plugin


def stage_of(parameters):
    """This rank's stage of four parameters, of which the first lives on both: (local, ids of the owned)."""
    shared, first, second, third = parameters
    local = [shared, first] if dist.get_rank() == 0 else [second, third, shared]
    return local, {id(p) for p in local if p is not shared or dist.get_rank() == 0}


@two_ranks
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("clip_val", [0.5, 1e3])
def test_clipping_matches_one_process(dtype, tolerance, clip_val):
    parameters = parameters_with_gradients(4, dtype)
    reference = copy.deepcopy(parameters)
    for p, q in zip(reference, parameters, strict=True):
        p.grad = q.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(reference, clip_val)

    local, owned = stage_of(parameters)
    foreign = nn.Parameter(torch.zeros(2))  # a parameter of the other stage: no gradient
    plugin = two_stages(owned=owned | {id(foreign)})
    torch.testing.assert_close(plugin.grad_norm(local), norm, rtol=tolerance, atol=0, check_dtype=False)
    plugin.clip_gradients(torch.optim.SGD([*local, foreign], lr=0.1), clip_val)
    for p, q in zip(reference, parameters, strict=True):
        if any(q is own_parameter for own_parameter in local):
            torch.testing.assert_close(q.grad, p.grad, rtol=tolerance, atol=0)
    assert foreign.grad is None


@two_ranks
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_norm_behaves_as_in_torch(value):
    parameters = parameters_with_gradients(4)
    parameters[1].grad[0, 0] = value  # on rank 0 only
    reference = copy.deepcopy(parameters)
    for p, q in zip(reference, parameters, strict=True):
        p.grad = q.grad.clone()
    torch.nn.utils.clip_grad_norm_(reference, 1.0)
    local, owned = stage_of(parameters)
    two_stages(owned=owned).clip_gradients(torch.optim.SGD(local, lr=0.1), 1.0)
    for p, q in zip(reference, parameters, strict=True):
        if any(q is own_parameter for own_parameter in local):
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, equal_nan=True)


@two_ranks
def test_rank_without_gradients_joins_the_norm():
    [parameter] = parameters_with_gradients(1)
    expected = parameter.grad.norm()
    if dist.get_rank() == 1:
        parameter.grad = None
    plugin = two_stages()
    torch.testing.assert_close(plugin.grad_norm([parameter]).double(), expected, rtol=1e-6, atol=0)
    plugin.clip_gradients(torch.optim.SGD([parameter], lr=0.1), 0.5)


@two_ranks
def test_values_are_clipped_locally():
    [parameter] = parameters_with_gradients(1)
    parameter.grad.fill_(dist.get_rank() + 0.25)
    two_stages().clip_gradients(torch.optim.SGD([parameter], lr=0.1), 0.5, GradClipAlgorithmType.VALUE)
    assert parameter.grad.max() == min(dist.get_rank() + 0.25, 0.5)


@pytest.mark.world(1)
@pytest.mark.parametrize("connected", [False, True])
def test_one_process_norm_is_bitwise_equal_to_torch(connected):
    parameters = parameters_with_gradients(3, torch.float32)
    reference = copy.deepcopy(parameters)
    for p, q in zip(reference, parameters, strict=True):
        p.grad = q.grad.clone()
    plugin = HybridPrecision("32-true")
    if connected:
        plugin.connect_mesh(Mesh.build(ParallelLayout(), "cpu"), set)
    norm = plugin.grad_norm(parameters)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(reference, 0.5))
    plugin.clip_gradients(torch.optim.SGD(parameters, lr=0.1), 0.5)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(parameters, reference, strict=True))


def scaled_step(plugin, parameter, optimizer, gradient):
    scaler = plugin.scaler
    scaler.scale(torch.zeros(()))
    parameter.grad = None if gradient is None else torch.full_like(parameter, gradient * scaler.get_scale())
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@two_ranks
@pytest.mark.parametrize("fused", [False, True])
def test_overflow_on_one_rank_skips_the_step_on_both(fused):
    plugin = two_stages("16-mixed")
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    before = plugin.loss_scale

    def step(gradient):
        if not fused:
            return scaled_step(plugin, parameter, optimizer, gradient)
        plugin.scaler.scale(torch.zeros(()))
        parameter.grad = torch.full_like(parameter, gradient * plugin.loss_scale)
        plugin.scaler.step(optimizer)
        plugin.scaler.update()

    step(float("inf") if dist.get_rank() == 1 else 1.0)
    assert parameter.detach().tolist() == [0.0] * 3
    assert plugin.loss_scale == before / 2
    step(1.0)
    assert parameter.detach().tolist() == [-1.0] * 3
    assert plugin.loss_scale == before / 2


@two_ranks
def test_fully_frozen_rank_skips_and_steps_with_the_other():
    plugin = two_stages("16-mixed")
    parameter = nn.Parameter(torch.zeros(3), requires_grad=dist.get_rank() == 0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for gradient in (float("nan"), 1.0):
        scaled_step(plugin, parameter, optimizer, gradient if dist.get_rank() == 0 else None)
    assert plugin.loss_scale == 2.0**15
    assert parameter.detach().tolist() == [-1.0 if dist.get_rank() == 0 else 0.0] * 3


@two_ranks
def test_teardown_releases_the_mesh():
    plugin = two_stages("16-mixed")
    plugin.teardown()
    assert plugin.mesh is None and plugin.scaler.mesh is None
    if dist.get_rank() == 0:  # on one rank; a collective would hang
        scaled_step(plugin, *one_step(), 1.0)


def one_step():
    parameter = nn.Parameter(torch.zeros(3))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


# --- one process -----------------------------------------------------------------------------------------------------


class OverflowingRegression(LightningModule):
    """Overflows float16 gradients in step `overflow_at`."""

    def __init__(self, overflow_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.overflow_at = overflow_at
        self.scales, self.weights, self.dtypes = [], [], set()

    def training_step(self, batch, batch_idx):
        [x] = batch
        y = self.net(x)
        self.dtypes.add(y.dtype)
        loss = (y.float() - x.float().sum(1, keepdim=True)).square().mean()
        return loss * 1e38 * 1e38 if batch_idx == self.overflow_at else loss

    def on_train_batch_end(self, *_):
        self.scales.append(self.trainer.scaler.get_scale() if self.trainer.scaler else 1.0)
        self.weights.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=4)


def fit(model, tmp_path, ckpt_path=None, max_steps=-1, **kwargs):
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **kwargs,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def test_float16_with_loss_scale_on_cpu(tmp_path):
    plugin = HybridPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    model = OverflowingRegression(overflow_at=2)
    trainer = fit(model, tmp_path, plugins=[plugin], gradient_clip_val=1.0)
    assert trainer.precision_plugin is plugin and trainer.precision == "16-mixed"
    assert trainer.scaler is plugin.scaler
    assert model.dtypes == {torch.float16}
    assert model.scales == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    skipped = [torch.equal(a, b) for a, b in zip(model.weights, model.weights[1:], strict=False)]
    assert skipped == [False, True, False, False, False]


@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoint_is_interchangeable_with_the_plugin_of_lightning(tmp_path, ours_first):
    def plugin(is_hybrid):
        scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
        return HybridPrecision("16-mixed", scaler=scaler) if is_hybrid else MixedPrecision("16-mixed", "cpu", scaler)

    first = fit(OverflowingRegression(), tmp_path, plugins=[plugin(ours_first)], max_steps=5)
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = fit(
        OverflowingRegression(), tmp_path, plugins=[plugin(not ours_first)], max_steps=5, ckpt_path=tmp_path / "a.ckpt"
    )
    assert first.scaler.state_dict()["scale"] == 128.0
    assert second.scaler.state_dict() == first.scaler.state_dict()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "16-mixed"])
def test_fit_is_bitwise_equal_to_lightning(tmp_path, name):
    stock = {
        "32-true": Precision,
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
        "16-true": lambda: HalfPrecision("16-true"),
        "64-true": DoublePrecision,
    }[name]
    models = []
    for plugin in (stock(), HybridPrecision(name), HybridPrecision.of(stock())):
        models.append(OverflowingRegression())
        fit(models[-1], tmp_path, plugins=[plugin], gradient_clip_val=0.5)
    assert models[0].dtypes == models[1].dtypes == models[2].dtypes
    for model in models[1:]:
        for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
            assert p.dtype == q.dtype and torch.equal(p, q)


@pytest.mark.parametrize("name", NAMES)
def test_user_plugin_is_kept(name):
    plugin = HybridPrecision(name)
    assert HybridPrecision.of(plugin) is plugin
    assert plugin.precision == name
    assert plugin.loss_scale == (2.0**16 if name == "16-mixed" else 1.0)


def test_user_scaler_keeps_its_settings():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    is_hybrid = HybridPrecision.of(MixedPrecision("16-mixed", "cpu", scaler)).scaler
    assert isinstance(is_hybrid, MeshGradScaler)
    assert is_hybrid.state_dict() == scaler.state_dict()
    parameter, optimizer = one_step()
    scaled_step(HybridPrecision("16-mixed", scaler=is_hybrid), parameter, optimizer, float("inf"))
    assert is_hybrid.get_scale() == 2.0
    again = MeshGradScaler("cpu")
    again.load_state_dict(is_hybrid.state_dict())
    assert again.state_dict() == is_hybrid.state_dict()
    assert not MeshGradScaler.of(torch.amp.GradScaler("cpu", enabled=False)).is_enabled()


def test_clipping_with_a_fused_optimizer():
    [parameter] = parameters_with_gradients(1, torch.float32)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        HybridPrecision("16-mixed").clip_gradients(optimizer, 0.5)
    HybridPrecision("32-true").clip_gradients(optimizer, 0.5)
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(0.5))


class UserPrecision(MixedPrecision):
    pass


class UserScaler(torch.amp.GradScaler):
    pass


@pytest.mark.parametrize(
    "plugin",
    [lambda: FSDPPrecision("32-true"), lambda: UserPrecision("bf16-mixed", "cpu")],
    ids=["other strategy", "subclass"],
)
def test_plugins_with_overrides_are_refused(plugin):
    with pytest.raises(TypeError, match="supported are Precision, MixedPrecision, HalfPrecision"):
        HybridPrecision.of(plugin())


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="precision='8-bit' is unknown; use one of 32-true, bf16-mixed"):
        HybridPrecision("8-bit")
    with pytest.raises(ValueError, match="takes no scaler"):
        HybridPrecision("bf16-mixed", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match="the scaler is a UserScaler"):
        HybridPrecision("16-mixed", scaler=UserScaler("cpu"))
