"""Upcycling dense MLPs to experts: detection, the first output, refusals, and checkpoints."""

import copy

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import MoEUpcycle
from lightning_hybrid.experts import GroupedExperts
from lightning_hybrid.experts.moe.dense import recognise
from lightning_hybrid.experts.moe.upcycling import ListedExperts, UpcycledMLP
from models.cases import Samples, batch_of, make
from models.hand_written import WIDTH, Layers, Lit, mlp


class Gated(nn.Module):
    """Three linears, the ones into the hidden layer in one."""

    def __init__(self):
        super().__init__()
        self.out, self.into = nn.Linear(24, WIDTH), nn.Linear(WIDTH, 48)

    def forward(self, x):
        right, left = self.into(x).chunk(2, -1)
        return self.out(F.silu(left) * right)


class Transposed(nn.Module):
    """A linear whose weight is [inputs, outputs]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def linears(activation, *, end=(), middle=(), make=nn.Linear):
    return nn.Sequential(make(WIDTH, 24), activation, *middle, make(24, WIDTH), *end)


FORMS = {
    "gelu": (linears(nn.GELU()), "gelu"),
    "square": (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), "relu"),
    "transposed": (linears(nn.GELU("tanh"), make=Transposed), "gelu_tanh"),
    "fused gate": (Gated(), "silu"),
    "dropout at the end": (linears(nn.ReLU(), end=[nn.Dropout(0.3)]), "relu"),
    "dropout inside": (linears(nn.ReLU(), middle=[nn.Dropout(0.3)]), ""),
    "no known activation": (linears(nn.Tanh()), ""),
    "a norm": (nn.Sequential(nn.LayerNorm(WIDTH), *linears(nn.ReLU())), ""),
    "partly frozen": (linears(nn.ReLU()), ""),
}
FORMS["partly frozen"][0][0].requires_grad_(False)


@pytest.mark.parametrize("name", FORMS)
def test_first_output_equals_the_dense_one(name):
    dense, activation = FORMS[name]
    assert recognise(dense).activation == activation
    dense = copy.deepcopy(dense).double().eval()
    root = nn.Module()
    root.mlp = copy.deepcopy(dense)
    for top_k in (1, 2):
        module = copy.deepcopy(root)
        assert MoEUpcycle("mlp", num_experts=4, top_k=top_k, router_std=1.0).upcycle(module) == ["mlp"]
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(module.mlp(x), dense(x), rtol=1e-12, atol=1e-12)
        assert type(module.mlp.moe.experts) is (GroupedExperts if activation else ListedExperts)
        module.mlp(x).square().sum().backward()
        reaches = float(module.mlp.moe.router.weight.grad.norm())
        assert reaches > 1e-3 if top_k == 1 else reaches < 1e-9  # with equal experts the weights of two cancel


def test_dropout_is_kept():
    root = nn.Module()
    root.mlp = linears(nn.ReLU(), end=[nn.Dropout(0.3)])
    MoEUpcycle("mlp").upcycle(root)
    dropped = (root.mlp(torch.randn(100, WIDTH)) == 0).float().mean()
    assert 0.2 < dropped < 0.4


def test_every_nth_match_shared_modules_and_noise():
    module = make("Layers")
    assert MoEUpcycle("layers.*", num_experts=2, every=2).upcycle(module) == ["layers.1", "layers.3"]
    module = make("Layers")
    module.layers[2] = module.layers[0]
    MoEUpcycle("layers.0", num_experts=2, noise=0.1).upcycle(module)
    assert module.layers[2] is module.layers[0] and isinstance(module.layers[0], UpcycledMLP)
    first, second = module.layers[0].moe.experts.experts
    ratio = (first[0].weight - second[0].weight).std() / second[0].weight.std()
    assert 0.1 < float(ratio.detach()) < 0.2


class Tied(Lit):
    def __init__(self):
        super().__init__()
        self.mlp, self.other = mlp(), nn.Linear(WIDTH, 2 * WIDTH)
        self.other.weight = self.mlp[0].weight


class Lone(Lit):
    def __init__(self, one):
        super().__init__()
        self.one = one


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Layers, {"pattern": "layer.*"}, r"'layer\.\*' matches no module of Layers.* did you mean 'layers"),
        (Layers, {"pattern": "layers"}, r"layers \(ModuleList\) cannot become experts: it takes no tensor"),
        (
            Layers,
            {"pattern": "head"},
            r"head \(Linear\) cannot become experts: it takes no .*returns shape \[2, 3, 4\]",
        ),
        (lambda: Lone(nn.LayerNorm(WIDTH)), {"pattern": "one"}, r"one \(LayerNorm\) cannot .* has no weight matrix"),
        (lambda: Lone(nn.Linear(WIDTH, WIDTH)), {"pattern": "one"}, r"one \(Linear\) cannot .* has one weight matrix"),
        (Layers, {"pattern": "layers.*", "every": 5}, r"every=5\) takes none of the 4 modules"),
        (Layers, {"pattern": "layers.*", "top_k": 9}, r"top_k=9 is more than num_experts=8"),
        (Layers, {"pattern": "layers.*", "num_experts": 0}, r"num_experts=0 must be a whole number"),
        (Tied, {"pattern": "mlp"}, r"mlp\.0\.weight is tied to a parameter of other"),
        (lambda: make("Encoder"), {"pattern": "encoder.layers.*"}, r"it does not process every position independently"),
    ],
)
def test_refusals(module, options, message):
    with pytest.raises(ValueError, match=message):
        MoEUpcycle(**options).upcycle(module())


def test_module_without_weights_is_refused():
    with torch.device("meta"):
        module = Layers()
    with pytest.raises(ValueError, match=r"layers\.0 has no weights .* built empty"):
        MoEUpcycle("layers.*").upcycle(module)


# --- through a Trainer -----------------------------------------------------------------------------------------------


def run(module, *callbacks, fn="fit", ckpt_path=None, **options):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), **options}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=list(callbacks), **quiet, **options)
    loaders = [DataLoader(Samples(module.kind, 4), 2)] * (2 if fn == "fit" else 1)
    getattr(trainer, fn)(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def experts(**options):
    return MoEUpcycle("layers.*", **{"num_experts": 3, "every": 2, "balance_loss": 0.5, **options})


class Returns(Layers):
    """Returns its loss in another type."""

    how = None

    def on_before_backward(self, loss):
        self.seen = loss.detach()

    def training_step(self, batch, batch_idx):
        return {"loss": {"loss": (loss := self.loss(batch)), "more": 3}, "nothing": None}.get(self.how, loss)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
@pytest.mark.parametrize("how", ["tensor", "loss", "nothing"])
def test_balance_loss_is_added_to_any_step_output(how):
    module = Returns().double()
    module.how = how
    plain = module.training_step(batch_of("vectors", range(2)), 0)
    trainer = run(module, experts(), fast_dev_run=True)
    balance = trainer.callback_metrics.get("balance_loss")
    assert "training_step" not in vars(module)
    if how == "nothing":
        assert plain is None and balance is None
        return
    plain = plain["loss"] if how == "loss" else plain
    assert 0.9 < float(balance) < 3  # two layers; an even load is 0.5 of each, and it cannot be less by far
    torch.testing.assert_close(module.seen, plain.detach() + balance)


def test_balance_loss_gradient_reaches_the_router():
    module = Layers().double()
    seen = []
    module.on_before_optimizer_step = lambda optimizer: seen.append(module.layers[1].moe.router.weight.grad.norm())
    run(module, experts(), fast_dev_run=True)
    assert float(seen[0]) > 1e-3  # equal experts alone give it none


def test_resume_is_bitwise_and_upcycles_once(tmp_path):
    torch.manual_seed(0)
    module = make("Layers")
    saved = ModelCheckpoint(tmp_path, save_top_k=-1)
    run(module, experts(), saved)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    run(module, experts(), fn="validate")
    run(module, experts(), fast_dev_run=True)
    assert module.state_dict().keys() == after.keys()

    torch.manual_seed(1)
    again = make("Layers")
    run(again, experts(), ModelCheckpoint(tmp_path), ckpt_path=str(tmp_path / "epoch=0-step=2.ckpt"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, after[name]), name

    weights = torch.load(tmp_path / "epoch=0-step=2.ckpt", weights_only=False)["state_dict"]
    by_hand = make("Layers")
    experts().upcycle(by_hand)
    by_hand.load_state_dict(weights)
    with pytest.raises(ValueError, match=r"layers\.1 is upcycled already, to 3 experts"):
        run(module, experts(num_experts=4))
    other = experts(every=4)
    other.upcycle(make("Layers"))
    with pytest.raises(ValueError, match=r"experts at layers\.1, layers\.3, and the module at layers\.3; use"):
        other.load_state_dict({"layers": ["layers.1", "layers.3"]})


def test_dense_checkpoint_is_refused_by_name(tmp_path):
    run(make("Layers"), ModelCheckpoint(tmp_path, filename="dense"), max_steps=1)
    with pytest.raises(ValueError, match=r"layers\.1 is dense in the checkpoint, which has layers\.1\.0\.weight"):
        run(make("Layers"), experts(), ckpt_path=str(tmp_path / "dense.ckpt"))


class Late(Lit):
    def configure_model(self):
        if not hasattr(self, "layers"):
            self.layers, self.head = nn.ModuleList(mlp() for _ in range(4)).double(), nn.Linear(WIDTH, 4).double()

    loss, forward = Layers.loss, Layers.forward


def test_modules_of_configure_model_are_found():
    module = Late()
    run(module, experts(), fast_dev_run=True)
    assert isinstance(module.layers[1], UpcycledMLP)


class Reentrant(Layers):
    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def test_balance_loss_without_gradient_is_refused():
    with pytest.raises(ValueError, match="the balance loss has no gradient"):
        run(Reentrant().double(), experts(), fast_dev_run=True)


class Manual(Layers):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused():
    with pytest.raises(ValueError, match="manual optimization does not"):
        run(Manual(), experts(), fast_dev_run=True)
