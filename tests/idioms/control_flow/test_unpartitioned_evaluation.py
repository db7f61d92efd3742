"""Evaluation steps that cannot be cut: they branch on values of the model, or run its layers in a loop."""

from functools import partial

import pytest
import torch
import torchmetrics
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from harness.layouts import each_under, under
from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, mlp

PP2, *_ = LAYOUTS
EXPERTS = Layout("ep2 x tp2", devices=4, strategy={"tensor_parallel_size": 2, "expert_parallel_size": 2})
ZERO = Layout("pp2 x zero 3", devices=4, strategy={"pipeline_parallel_size": 2, "zero_stage": 3})
WORDS, LENGTH, END = 11, 4, 3


class Deciding(Regressor):
    """Branches on its error to choose what to log; computed weights, statistics of a norm."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.computed = parametrizations.weight_norm(nn.Linear(FEATURES, FEATURES))
        self.head = nn.Linear(FEATURES, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.halved = 0

    def forward(self, x):
        return self.head(self.computed(self.norm(self.body(x))))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        while out.abs().max() > 1e-2:
            out = out * 0.5
            self.halved += 1
        self.error(out, y)
        self.log("error", self.error, on_epoch=True)
        self.log("val_loss", F.mse_loss(out, y))
        self.log("halved", float(self.halved))


class Writer(LightningModule):
    """A language model that writes until it has written the last word, as tests of it do."""

    def __init__(self):
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, 8), nn.Dropout(0.2)
        self.places = nn.Parameter(torch.randn(1, 3 * LENGTH, 8))
        layer = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True, dropout=0.0)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text):
        h = self.dropout(self.words(text) + self.places[:, : text.shape[1]])
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], dtype=h.dtype)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(h)

    def loss(self, text):
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def written(self, text):
        done = torch.zeros(len(text), dtype=torch.bool)
        while text.shape[1] < 2 * LENGTH and not done.all():
            following = self(text)[:, -1].argmax(-1)
            done |= following == END
            text = torch.cat([text, following[:, None]], 1)
        return text

    def validation_step(self, batch, batch_idx):
        text = self.written(batch[0][:, :2])
        self.log("val_loss", self.loss(batch[0]))
        self.log("length", float(text.shape[1]))

    def test_step(self, batch, batch_idx):
        text = batch[0]
        while text.shape[1] < 2 * LENGTH and int(text[0, -1]) != END:  # drawn, and not the likeliest
            drawn = torch.multinomial(self(text)[:, -1].softmax(-1), 1)
            text = torch.cat([text, drawn], 1)
        self.log("test_length", float(text.shape[1]))
        self.log("test_words", text.double().mean())

    def predict_step(self, batch, batch_idx):
        return {"text": self.written(batch[0][:, :3]), "loss": self.loss(batch[0])}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Decoder(Regressor):
    """A recurrent decoder that stops when its output is small."""

    def __init__(self):
        super().__init__()
        self.encoder, self.cell = mlp(3), nn.GRUCell(FEATURES, FEATURES)
        self.memory, self.head = nn.LSTM(FEATURES, FEATURES, batch_first=True), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.memory(self.cell(self.encoder(x))[:, None])[0][:, 0])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        state, steps = self.encoder(x), 0
        while steps < 5 and (state.norm() > 0.5 * (steps + 1)).item():
            state = self.cell(state, state)
            steps += 1
        outputs, _ = self.memory(state[:, None])
        self.log_dict({"val_loss": F.mse_loss(self.head(outputs[:, 0]), y), "steps": float(steps)})


class Backwards(Deciding):
    """Validates with its layers in reverse order, after a buffer that training writes at its end."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        with torch.no_grad():
            self.center.lerp_(out.mean(0), 0.5)
        return F.mse_loss(out, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        x = self.norm(x - self.center)
        for layer in reversed(self.body):
            x = layer(x)
        self.log("val_loss", F.mse_loss(self.head(x), y))


class Generates(LightningModule):
    """transformers' beam search, with its cache: an encoder and a decoder, several candidates at a time."""

    def __init__(self):
        super().__init__()
        config = transformers.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, eos_token_id=END, pad_token_id=0,
        )  # fmt: skip
        self.model = transformers.T5ForConditionalGeneration(config)

    def training_step(self, batch, batch_idx):
        (text,) = batch
        return self.model(input_ids=text, labels=text).loss

    def validation_step(self, batch, batch_idx):
        written = self.model.generate(batch[0], max_new_tokens=4, num_beams=2, do_sample=False)
        self.log("val_loss", self.training_step(batch, batch_idx))
        self.log("written", written.double().mean())

    configure_optimizers = Writer.configure_optimizers


class Routed(LightningModule):
    """Experts, and a validation that branches on their load."""

    def __init__(self):
        super().__init__()
        config = transformers.MixtralConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        )  # fmt: skip
        self.model = transformers.MixtralForCausalLM(config)

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch[0][:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss if loss > 0.1 else loss.sqrt())

    configure_optimizers = Writer.configure_optimizers


class Counting(nn.Module):
    """A layer that counts how often it was trained, and scales by it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(FEATURES, FEATURES), 0, torch.zeros(FEATURES)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen = self.seen.to(x) * 0.5 + x.detach().mean(0)
        return self.linear(x) / (1 + 0.1 * self.calls) + self.seen.to(x)


class Remembering(Regressor):
    """Metrics and attributes that training feeds; validation reads them, derives and writes parameters."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(mlp(2), Counting(), mlp(1), Counting()), nn.Linear(FEATURES, 1)
        self.error = torchmetrics.MeanSquaredError()

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.error.update(out, batch[1])
        return F.mse_loss(out, batch[1])

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = F.mse_loss(self(batch[0]), batch[1])
            norms = [g.norm() for g in torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)]
            loss.backward()
        self.error.update(self(batch[0]), batch[1])
        self.log("error_so_far", self.error.compute())
        self.log("norm", sum(p.grad.norm() for p in self.parameters()) + sum(norms))
        self.log("val_loss", loss if loss > 0.1 else loss * 2)
        self.log("halves", sum(half.norm() for half in self.head.weight.chunk(2, 1)))
        self.zero_grad()
        for parameter in self.body.parameters():
            parameter.data.mul_(0.9)
        with torch.no_grad():
            self.head.weight.add_(0.1)


def texts():
    texts = torch.randint(WORDS, (24, LENGTH), generator=torch.Generator().manual_seed(0))
    loaders = {kind: DataLoader(TensorDataset(texts[-4:]), 4) for kind in ("val", "test", "predict")}
    train = DataLoader(TensorDataset(texts[:16]), 4)
    return {"train_dataloaders": train, **{f"{kind}_dataloaders": loader for kind, loader in loaders.items()}}


def few_texts():
    return {kind: loader for kind, loader in texts().items() if kind[:3] in ("tra", "val")}


REMEMBERED = {"trainer": {"inference_mode": False, "val_check_interval": 2}, "num_microbatches": 1, "steps": 4}


class NamedTwice(Regressor):
    """One activation under two names: of the module, and of a sequence in it (torchmd-net's MLP)."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()
            self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), self.act, nn.Linear(FEATURES, FEATURES))
            self.deeper = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))

        def forward(self, x):
            return self.deeper(self.layers(x))

    def __init__(self):
        super().__init__()
        self.body, self.head = self.Layers(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        if loss > 1e9:
            raise ValueError
        self.log("val_loss", loss)


MODULES = [
    (Deciding, None),
    (NamedTwice, None),
    (Writer, texts),
    (Decoder, None),
    (Backwards, None),
    (Generates, few_texts),
]


def same(worlds, module, make_data, layout, **options):
    report = check(worlds, module, layout, **({} if make_data is None else {"make_data": make_data}), **options)
    assert report.outcome == "same", str(report)
    if layout is EXPERTS:  # one stage runs every step as it is
        return
    step_names = {"validation_step", "test_step", "predict_step"} if module is Writer else {"validation_step"}
    assert any(set(note.split(":")[0].split(", ")) == step_names for note in report.notes), report.notes


COVERED = {(Writer, texts): (Generates, few_texts)}


@each_under("module, make_data", MODULES, [PP2, COMBINED], covered_by=COVERED)
def test_stages(worlds, module, make_data, layout):
    same(worlds, module, make_data, layout)


@under([PP2, TENSOR])
def test_state_written_by_training_and_by_validation(worlds, layout):
    same(worlds, Remembering, None, layout, **REMEMBERED)


# --- what the ranks do -----------------------------------------------------------------------------------------------


# --- shards of other ranks -------------------------------------------------------------------------------------------


@each_under("module, make_data", [MODULES[0], (Writer, texts)], [TENSOR, ZERO])
def test_tensor_parallel_and_zero(worlds, module, make_data, layout):
    same(worlds, module, make_data, layout)


@pytest.mark.extended  # by default over stages, tensor ranks and ZeRO
@under([EXPERTS])
def test_expert_parallel(worlds, layout):
    same(worlds, Routed, few_texts, layout, precision="32-true")
