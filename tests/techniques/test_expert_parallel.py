"""Expert parallelism: replicas shard the experts of unmodified models, and match single-process training."""

import re
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from harness.checkpoint_runs import PLAIN, PP2, TP2, ZERO, Layout, assert_same_state, folders, save_halfway, train
from harness.fits import Run, assert_parity, check, fit, fit_reference, reference_of, refusal
from lightning_hybrid.callbacks import ActivationOffload
from lightning_hybrid.cli import main as command_line
from lightning_hybrid.experts import register_experts
from lightning_hybrid.techniques.experts import ExpertParallel
from models.mixtures import DeepseekV3, FewTokens, FewTokensForAll, GptOss, Looped, Mixtral, Qwen3Moe
from models.moe_layers import Balanced, Experts

SLOW = pytest.mark.slow


def shared(case=Mixtral, *, slow=False, **options):
    run = Run(case, **{"dp": 2, "ep": 2, **options})
    return pytest.param(run, marks=SLOW) if slow else run


def slow(run):
    return pytest.param(run, marks=SLOW)


class Four(Mixtral):
    """As many key heads as heads."""

    key_heads = 4


class OnlyExperts(Experts):
    """Tensor ranks can shard nothing but experts."""

    options: ClassVar = {"balance_loss": 0.0}

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Identity()


class ByHand(Balanced):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ClipsItself(ByHand):
    """By values and the norm of the gradients, in a step that calls its optimizer; a hook reads these."""

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        self.manual_backward(loss)
        for value, how in ((0.5, "value"), (0.05, "norm")):
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=how)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        assert float(torch.stack(norms).norm()) < 0.05


class ClipsByHand(ByHand):
    """By torch's function, which reads all gradients."""

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}


class StepsInTwo(ByHand):
    """Two backwards before a step, the first of which leaves an average to which the second one adds."""

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        self.manual_backward(loss)
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(batch) / 3)
        self.manual_backward(self.loss(batch) / 2)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}


class KeepsGradients:
    """Gradients of all batches add up."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class KeepsStacked(KeepsGradients, Balanced):
    pass


class Scaled(torch.nn.Module):
    """An expert with a number, which ranks do not share, or a vector."""

    def __init__(self, inner, scale=0.7):
        super().__init__()
        self.inner, self.scale = inner, torch.nn.Parameter(torch.tensor(scale))

    def forward(self, rows):
        return self.inner(rows) * self.scale


class KeepsListed(KeepsGradients, Looped):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.moe.experts = torch.nn.ModuleList(map(Scaled, layer.moe.experts))


class VectorListed(KeepsGradients, Looped):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.moe.experts = torch.nn.ModuleList(Scaled(expert, [0.7]) for expert in layer.moe.experts)


class Clamps(Balanced):
    """A hook that is not linear sees the gradient of one process where one rank holds an expert."""

    def on_fit_start(self):
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


class Masks:
    """Hooks of either kind with a mask of each parameter's shape."""

    def on_fit_start(self):
        for number, parameter in enumerate(self.parameters()):
            mask = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape).cos()

            def masked(gradient, mask=mask):
                return gradient * mask

            def mask_in_place(of, mask=mask):
                of.grad.mul_(mask)

            if number % 2:
                parameter.register_hook(masked)
            else:
                parameter.register_post_accumulate_grad_hook(mask_in_place)


class MasksStacked(Masks, GptOss):
    pass


class MasksListed(Masks, FewTokens):
    pass


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}

RUNS = {
    "Mixtral": shared(trainer=CLIPPED),
    "a list of experts": shared(Looped, trainer=CLIPPED),
    "experts without rows": shared(FewTokens, batch_size=1, microbatches=1, num_batches=3),
    "experts called without rows": shared(FewTokensForAll, batch_size=1, microbatches=1, num_batches=3, slow=True),
    "Qwen3": shared(Qwen3Moe, slow=True),
    "DeepSeek": shared(DeepseekV3, slow=True),
    "gpt-oss": shared(GptOss),
    "our layer": shared(Balanced),
    "clipped in the step": shared(ClipsItself, microbatches=1),
    "clipped in the step, two copies": shared(ClipsItself, microbatches=1, dp=4, slow=True),
    "clipped in the step, zero3": shared(ClipsItself, microbatches=1, dp=4, strategy={"zero_stage": 3}, slow=True),
    "clipped in the step, context ranks": shared(ClipsItself, microbatches=1, cp=2, ep=4, slow=True),
    "clipped by hand": shared(ClipsByHand, microbatches=1),
    "clipped by hand, tensor ranks": shared(ClipsByHand, microbatches=1, tp=2, slow=True),
    "clipped by hand, zero2": shared(ClipsByHand, microbatches=1, dp=4, strategy={"zero_stage": 2}, slow=True),
    "clipped by hand, context ranks": shared(ClipsByHand, microbatches=1, cp=2, ep=4, slow=True),
    "two backwards": shared(StepsInTwo, microbatches=1),
    "two backwards, two copies": shared(StepsInTwo, microbatches=1, dp=4, slow=True),
    "two backwards, zero3": shared(StepsInTwo, microbatches=1, dp=4, strategy={"zero_stage": 3}, slow=True),
    "two backwards, context ranks": shared(StepsInTwo, microbatches=1, cp=2, ep=4, slow=True),
    "gradients that are kept": shared(KeepsStacked, num_batches=4, trainer=CLIPPED, slow=True),
    "gradients that are kept, a list": shared(KeepsListed, num_batches=4, trainer=CLIPPED),
    "gradients that are kept, zero3": shared(KeepsListed, dp=4, strategy={"zero_stage": 3}, slow=True),
    "a vector in each expert, tensor ranks": shared(VectorListed, tp=2, slow=True),
    "a vector in each expert, context ranks": shared(VectorListed, cp=2, ep=4, slow=True),
    "gradients that are kept, context ranks": shared(KeepsStacked, cp=2, ep=4, slow=True),
    "clamped in hooks": shared(Clamps),
    "masks on gradients": shared(MasksStacked),
    "masks on gradients, a list": shared(MasksListed, batch_size=1, microbatches=1, num_batches=3),
    "masks on gradients, a list, microbatches": shared(MasksListed),
    "masks on gradients, tensor ranks": shared(MasksStacked, tp=2, slow=True),
    "masks on gradients, a list, tensor ranks": shared(MasksListed, tp=2, slow=True),
    "masks on gradients, zero3": shared(MasksStacked, dp=4, strategy={"zero_stage": 3}, slow=True),
    "masks on gradients, stages": shared(MasksStacked, pp=2, slow=True),
    "two copies": shared(dp=4, trainer=CLIPPED, slow=True),
    "over stages": shared(pp=2, validate=True),
    "a list over tensor ranks, validated": shared(Looped, tp=2, validate=True),
    "over tensor ranks": shared(tp=2, trainer=CLIPPED, slow=True),  # as without data ranks
    "sharded by tensor ranks only": Run(GptOss, tp=2, trainer=CLIPPED),
    "sharded by tensor ranks only, Mixtral": slow(Run(Mixtral, tp=2, validate=True, trainer=CLIPPED)),
    "sharded by tensor ranks only, moe layer": slow(Run(Balanced, tp=2)),
    "sharded by tensor ranks only, DeepSeek": slow(Run(DeepseekV3, tp=2)),
    "cut by tensor ranks, gpt-oss": shared(GptOss, tp=2, validate=True, slow=True),
    "cut by tensor ranks, in chunks": shared(Qwen3Moe, tp=2, strategy={"expert_chunks": 2}, slow=True),
    "cut by tensor ranks, zero3 by layer": slow(
        Run(GptOss, dp=2, tp=2, strategy={"zero_stage": 3, "reshard_after_forward": True}, trainer=CLIPPED)
    ),
    "cut by tensor ranks, zero3": shared(GptOss, dp=4, tp=2, strategy={"zero_stage": 3}, trainer=CLIPPED, slow=True),
    "cut by tensor ranks, recomputed": shared(GptOss, tp=2, pp=2, strategy={"recompute": "full"}, slow=True),
    "cut by tensor ranks, a short batch": slow(Run(GptOss, tp=2, num_batches=3, last=3)),
    "over context ranks, a short batch": shared(Qwen3Moe, dp=1, cp=2, num_batches=3, last=3, slow=True),
    "cut by tensor ranks, nothing else": slow(Run(OnlyExperts, tp=2)),
    "cut by tensor ranks, four": slow(Run(Four, tp=4)),
    "dp2tp2pp2": shared(tp=2, pp=2, slow=True),
    "zero3": shared(dp=4, strategy={"zero_stage": 3}, trainer=CLIPPED),
    "in chunks": shared(strategy={"expert_chunks": 2}),
    "recomputed": shared(strategy={"recompute": "full"}),
    "validated": shared(validate=True, strategy={"verify_first_step": True}, slow=True),
    "ep4": shared(dp=4, ep=4, slow=True),
    "ep4, a list": shared(Looped, dp=4, ep=4, slow=True),
    "ep4 over stages": shared(Qwen3Moe, dp=4, ep=4, pp=2, slow=True),
    "a list over stages and tensor ranks": shared(Looped, pp=2, tp=2, slow=True),
    "a list, zero3": shared(Looped, dp=4, strategy={"zero_stage": 3}, trainer=CLIPPED, slow=True),
    "a list, zero3 by layer": shared(
        Looped, dp=4, strategy={"zero_stage": 3, "reshard_after_forward": True}, slow=True
    ),
    "zero3 by layer": shared(dp=4, strategy={"zero_stage": 3, "reshard_after_forward": True}, slow=True),
    "zero2 within the experts' ranks": shared(dp=4, ep=4, strategy={"zero_stage": 2, "shard_size": 2}, slow=True),
    "zero1 over stages": shared(dp=2, pp=2, strategy={"zero_stage": 1}, validate=True, slow=True),
    "a list, recomputed": shared(Looped, strategy={"recompute": "full"}, slow=True),
    "partly recomputed": shared(strategy={"recompute": "selective"}, slow=True),
    "a list, validated": shared(Looped, validate=True, slow=True),
    "interleaved": shared(pp=2, strategy={"stages_per_rank": 2}, slow=True),
    "over context ranks": shared(dp=1, cp=2, trainer=CLIPPED),
    "over context ranks, Qwen3": shared(Qwen3Moe, dp=1, cp=2, slow=True),
    "over context ranks, a list": shared(Looped, dp=1, cp=2, trainer=CLIPPED, slow=True),
    "over context and data ranks": shared(cp=2, ep=4, trainer=CLIPPED, slow=True),
    "over context and data ranks, Qwen3": shared(Qwen3Moe, cp=2, ep=4, slow=True),
    "over context ranks of two replicas": shared(cp=2, slow=True),
    "over context ranks of two replicas, Qwen3": shared(Qwen3Moe, cp=2, strategy={"recompute": "full"}, slow=True),
    "over context and tensor ranks": shared(Looped, dp=1, cp=2, tp=2, slow=True),
    "over context ranks, cut by tensor ranks": shared(Four, dp=1, cp=2, tp=2, slow=True),
    "over context ranks, zero3": shared(cp=2, strategy={"zero_stage": 3}, trainer=CLIPPED, slow=True),
    "over context ranks, few rows": shared(FewTokens, cp=2, dp=1, batch_size=1, microbatches=1, slow=True),
    "context, a list": shared(Looped, cp=2, slow=True),
    "sequence sharded": shared(tp=2, sequence=True, slow=True),
}


# Their routers compute in float32 for any parameter dtype.
IN_FLOAT32 = {DeepseekV3: 1e-5}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_parity(worlds, run):
    check(worlds, run, tolerance=IN_FLOAT32.get(run.case, 1e-10))


class OnDisk(ActivationOffload):
    """What layers save, experts included."""

    recorded = None

    def __init__(self, folder):
        super().__init__(min_bytes=1, to=f"disk:{folder}")


def test_activations_on_disk(worlds, tmp_path):
    plain = Run(Mixtral, dp=2, ep=2)
    run = replace(plain, callback=partial(OnDisk, tmp_path))
    assert_parity(worlds.run(2, fit, run), reference_of(worlds, plain), run)


class SavesAfterwards(Callback):
    """Saves a folder after the run."""

    recorded = None

    def __init__(self, path):
        self.path = path

    def on_fit_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_folder_of_manual_steps_under_stages(worlds, tmp_path):
    """Stages hold shards of all else instead, and the same experts, whose states one of them writes."""
    path = tmp_path / "folder.ckpt"
    folders = {"save_distributed_checkpoint": True}
    run = Run(ClipsByHand, pp=2, dp=2, ep=2, microbatches=1, strategy=folders, callback=partial(SavesAfterwards, path))
    worlds.run(4, fit, run)
    assert (path / "manifest.json").exists()


@pytest.mark.parametrize(("precision", "tolerance"), [pytest.param("32-true", 1e-3, marks=SLOW), ("bf16-mixed", 0.2)])
def test_precisions(worlds, precision, tolerance):
    """Where rounding changes the routing, as in a tiny Mixtral, plain replicas differ as much."""
    options = {"trainer": {"precision": precision}, "dtype": torch.float32, "change": with_sgd}
    check(worlds, shared(Looped, **options), tolerance=tolerance)


def with_sgd(module):
    module.optimizer = "sgd"


# --- memory and messages of a rank -----------------------------------------------------------------------------------


class CountsExperts(Callback):
    """Bytes of experts between two steps, and the all-to-alls of the latest step."""

    recorded, before = None, 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        [optimizer] = trainer.optimizers
        with torch._C.DisableTorchFunction():
            experts = [p for name, p in pl_module.named_parameters() if ".experts." in name]
            local = {
                "parameters": sum(p.untyped_storage().nbytes() for p in experts),
                "gradients": sum(p.grad.nbytes for p in experts if p.grad is not None),
                "states": sum(v.nbytes for p in experts for v in optimizer.state[p].values() if v.dim()),
            }
        run = getattr(trainer.strategy, "run", None)
        shared = None if run is None else getattr(run.technique(ExpertParallel), "shared", None)
        number = shared.ranks.num_exchanges if shared is not None else 0
        self.recorded, self.before = (local, number - self.before), number


@pytest.mark.parametrize(
    "run",
    [shared(), shared(Looped, slow=True), shared(dp=1, cp=2, slow=True), Run(Mixtral, tp=2), shared(tp=2, slow=True)],
    ids=["Mixtral", "a list", "over context ranks", "tensor ranks", "and tensor ranks"],
)
def test_bytes_are_sharded_and_exchanges_counted(worlds, run):
    run = replace(run, microbatches=1, callback=CountsExperts)
    [(full, _)] = worlds.run(1, local_bytes, run)
    ranks = [rank.extra for rank in worlds.run(run.world_size, fit, run)]
    for what, size in full.items():
        assert sum(local[what] for local, _ in ranks) == size > 0, (what, full, ranks)
        assert ranks[0][0][what] == size // run.world_size, what
    layers = 2 * (run.ep > 1)
    assert [number for _, number in ranks] == [(2 + 2) * layers] * len(ranks)  # two forward and two backward


def local_bytes(run):
    return fit_reference(run).extra


# --- checkpoints ------------------------------------------------------------------------------------------------------

EP2 = Layout(1, dp=2, options=(("expert_parallel_size", 2),))
EP2_PP2 = Layout(2, dp=2, options=(("expert_parallel_size", 2),))
EP2_CP2 = Layout(1, cp=2, options=(("expert_parallel_size", 2),))
EP2_TP2 = Layout(1, dp=2, tp=2, options=(("expert_parallel_size", 2), ("zero_stage", 2)))
EP4_CP2 = Layout(1, dp=2, cp=2, options=(("expert_parallel_size", 4), ("zero_stage", 1)))
EP2_ZERO = Layout(1, dp=4, options=(("expert_parallel_size", 2), ("zero_stage", 3)))


@pytest.mark.parametrize(
    ("case", "saving", "loading"),
    [
        pytest.param("Looped", EP2, (ZERO, PLAIN), id="a list of experts, by others"),
        pytest.param("Mixtral", EP2_ZERO, (EP2_PP2,), id="zero x ep2, by ep2 over stages", marks=SLOW),
        pytest.param("Mixtral", EP2_ZERO, (PP2,), id="zero x ep2, by stages", marks=SLOW),
        pytest.param("Mixtral", PP2, (EP2, EP2_ZERO), id="by ep2", marks=SLOW),
        pytest.param("Mixtral", EP2_CP2, (EP2, EP4_CP2), id="over context, by others", marks=SLOW),
        pytest.param("Mixtral", EP4_CP2, (PLAIN, EP2_CP2), id="over both, by others", marks=SLOW),
        pytest.param("Mixtral", TP2, (PLAIN, EP2_TP2), id="tp2, by ep2 over tensor ranks", marks=SLOW),
        pytest.param("Mixtral", EP2_TP2, (PLAIN, TP2), id="ep2 over tensor ranks, by others", marks=SLOW),
        pytest.param("Looped", EP2_CP2, (PLAIN, EP4_CP2), id="a list over context", marks=SLOW),
    ],
)
@pytest.mark.parametrize("kind", ["file", pytest.param("folder", marks=SLOW)])
def test_resume_under_every_layout(worlds, tmp_path, case, saving, loading, kind):
    path = str(tmp_path / "half.ckpt")
    [(expected, steps)] = worlds.run(1, train, case, PLAIN, 2)
    worlds.run(saving.world_size, save_halfway, case, folders(saving) if kind == "folder" else saving, path)
    for layout in loading:
        resumed = path
        if layout is PLAIN and kind == "folder":
            resumed = str(tmp_path / "one.ckpt")
            assert command_line(["checkpoint", "convert", path, resumed]) == 0
        for state, reached in worlds.run(layout.world_size, train, case, layout, 2, resumed):
            assert reached == steps == 4, layout
            assert_same_state(state, expected)


# --- refusals ---------------------------------------------------------------------------------------------------------


class OfAllRows(MixtralExperts):
    """A row's result depends on the other ones, so rows cannot be computed on other ranks."""

    def forward(self, hidden, which, weights):
        return super().forward(hidden - hidden.mean(0), which, weights)


def mixed_up(module):
    for layer in module.model.model.layers:
        layer.mlp.experts.__class__ = OfAllRows


def ragged(module):
    """The second batch of the second replica is shorter."""

    def shorten(batch, dataloader_idx):
        is_short = module.trainer.global_rank == 1 and module.trainer.global_step == 1
        return {name: value[:2] for name, value in batch.items()} if is_short else batch

    module.on_before_batch_transfer = shorten


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("Layers", dp=2, ep=2), r"finds no experts that 2 ranks can share \(no module has stacked experts"),
        (
            Run(Mixtral, dp=3, ep=3),
            r"its 4 experts are no multiple of 3\); set a size that divides",
        ),
        (
            shared(change=mixed_up),
            r"experts \(2\): not the same in the proof: the output differs by",
        ),
        (shared(change=ragged), r"their batches have 1 to 2 microbatches \(. here\); give them batches of equal size"),
        (
            shared(strategy={"compile": {"backend": "aot_eager", "fullgraph": True}}),
            "experts that are sharded over ranks run between two graphs; leave fullgraph out",
        ),
        (
            Run(KeepsListed, cp=2, ep=2),
            "experts.0.scale' is a single number, whose gradients on tensor or context ranks",
        ),
        (Run(KeepsListed, tp=2, dp=2, ep=2), "is a single number, .* make it a vector of one element"),
        (Run(Mixtral, dp=2, ep=4), "expert_parallel_size=4 does not divide; set expert_parallel_size=2"),
    ],
    ids=[
        "no experts",
        "uneven",
        "fails its proof",
        "ragged",
        "in one graph",
        "number",
        "number over tensor ranks",
        "too many",
    ],
)
def test_refused(worlds, run, message):
    for refused_with in worlds.run(run.world_size, refusal, fit, run):
        assert re.search(message, refused_with), refused_with


def test_adapter_is_a_class():
    with pytest.raises(TypeError, match="give a subclass of"):
        register_experts(Mixtral)
