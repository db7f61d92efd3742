"""Small LightningModules as users write them, whose batches are functions of the samples' indices."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
VOCABULARY = 32
LENGTH = 6


class Lit(LightningModule):
    """Base of the cases: an optimizer with a state, and a logged loss."""

    kind = "vectors"
    optimizer = "adam"

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def training_step(self, batch, batch_idx=0):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx=0):
        self.log("val_loss", self.loss(batch))

    def loss(self, batch) -> Tensor:
        raise NotImplementedError


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


# --- hand-written ----------------------------------------------------------------------------------------------------


class Layers(Lit):
    """A plain stack of residual blocks."""

    def __init__(self, num_layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["label"])


class Dropouts(Layers):
    """Dropout inside units and in the glue."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.append(nn.Dropout(0.3))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(x + layer(x), 0.1, self.training)
        return self.head(x)


class SeveralForwards(Lit):
    """The step calls the network on two views of each sample, and again without gradients."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(mlp() for _ in range(4)))

    def loss(self, batch):
        a, b = self.net(batch["x"]), self.net(batch["x"].flip(1))
        with torch.no_grad():
            target = self.net(batch["x"] * 0.5)
        return F.mse_loss(a, b) + F.mse_loss(a, target) + 0.1 * (b**2).mean()


class EncoderDecoder(Lit):
    """Every decoder layer reads the encoder's output."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(mlp() for _ in range(3))
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def loss(self, batch):
        memory = batch["x"]
        for layer in self.encoder:
            memory = memory + layer(memory)
        y = batch["y"]
        for layer in self.decoder:
            y = y + 0.2 * layer(y, memory)
        return (y**2).mean()


class UNet(Lit):
    """Each step down is added to its mirror image on the way up."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(mlp() for _ in range(4))
        self.up = nn.ModuleList(mlp() for _ in range(4))

    def loss(self, batch):
        x, skips = batch["x"], []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for layer in self.up:
            x = layer(x + skips.pop())
        return F.mse_loss(x, batch["y"])


class Branches(Lit):
    """Two branches that do not read each other, joined at the end."""

    def __init__(self):
        super().__init__()
        self.left, self.right = mlp(), mlp()
        self.left2, self.right2 = mlp(), mlp()
        self.head = nn.Linear(2 * WIDTH, 4)

    def loss(self, batch):
        left = self.left2(self.left(batch["x"]))
        right = self.right2(self.right(batch["y"]))
        return F.cross_entropy(self.head(torch.cat([left, right], -1)), batch["label"])


class GlueParameters(Lit):
    """Parameters that no submodule owns, read by the step itself at both ends; some in a ParameterList."""

    def __init__(self):
        super().__init__()
        self.pos_emb = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.gates = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(4))
        self.layers = nn.ModuleList(mlp() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def loss(self, batch):
        x = batch["x"] + self.pos_emb
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = x + torch.sigmoid(gate) * layer(x)
        return F.mse_loss(x * self.scale, batch["y"])


class LateReaders(Lit):
    """Embeddings and masks made first and read only much later, some by several stages."""

    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(mlp() for _ in range(4))

    def loss(self, batch):
        condition = torch.tanh(self.condition(batch["y"]))
        keep = (condition > 0).detach()
        x = batch["x"]
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index >= 2:
                x = torch.where(keep, x, x * condition)
        return ((x - condition) ** 2).mean()


class AuxiliaryLosses(Lit):
    """Every layer adds its own term to the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(4))

    def loss(self, batch):
        x, terms = batch["x"], []
        for layer in self.layers:
            x = x + layer(x)
            terms.append(x.pow(2).mean() * 0.1 + sum(p.pow(2).sum() for p in layer.parameters()) * 1e-3)
        return F.mse_loss(x, batch["y"]) + torch.stack(terms).sum()


class Tied(Lit):
    """The head is the embedding."""

    kind = "tokens"

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(mlp() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch):
        x = self.embedding(batch["input_ids"])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class Decoder(Lit):
    """A hand-written language model with an odd vocabulary size, and the loss in the step."""

    kind = "tokens"
    rows = 35

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(self.rows, WIDTH)
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.make_head()

    def make_head(self):
        self.head = nn.Linear(WIDTH, self.rows)

    def logits(self, h):
        return self.head(h)

    def forward(self, ids):
        h = self.wte(ids)
        for block in self.blocks:
            h = h + block(h)
        return self.logits(self.norm(h))

    def loss(self, batch):
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class TiedInStep(Decoder):
    """The step reads the embedding's weight."""

    def make_head(self):
        pass

    def logits(self, h):
        return F.linear(h, self.wte.weight)


class InPlace(Lit):
    """In-place operations, and results written into fresh zeros row by row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(4))

    def loss(self, batch):
        x = batch["x"]
        rows = torch.zeros(x.shape[0], len(self.layers), WIDTH, dtype=x.dtype)
        for index, layer in enumerate(self.layers):
            h = layer(x)
            h += x
            h.mul_(0.9)
            rows[:, index] = h
            x = h
        x = x.clone()
        x[:, ::2] = x[:, ::2] * 2
        x.add_(rows.sum(1))
        return F.mse_loss(x, batch["y"])


class Masks(Lit):
    """Indexing by a mask of the batch, before, between and after the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(4))

    def loss(self, batch):
        mask = batch["mask"]
        x = batch["x"]
        x = x + self.layers[0](x)
        rows = self.layers[1](x[mask])
        rows = rows + self.layers[2](rows)
        x = x.clone()
        x[mask] = rows
        return (self.layers[3](x)[~mask] ** 2).sum() / len(mask) + (rows**2).sum() / len(mask)


class BatchNorms(Lit):
    """Batch statistics, running statistics, and a count of batches in every block."""

    optimizer = "sgd"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x) + x
        return F.mse_loss(self.norm(x), batch["y"])


class Recurrent(Lit):
    """LSTMs over tokens."""

    kind = "tokens"

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm1 = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.lstm2 = nn.LSTM(WIDTH, WIDTH, batch_first=True, num_layers=2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch):
        x, state = self.lstm1(self.embedding(batch["input_ids"]))
        x, (h, _) = self.lstm2(x, tuple(s.repeat(2, 1, 1) for s in state))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten()) + (h**2).mean()


class Attention(Lit):
    """nn.MultiheadAttention called by the step, with an attention mask and its weights used."""

    kind = "tokens"

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch):
        x = self.embedding(batch["input_ids"])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        entropy = 0.0
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            h, weights = attention(x, x, x, attn_mask=mask)
            x = norm(x + h)
            entropy = entropy - (weights * (weights + 1e-9).log()).sum(-1).mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten()) + 0.01 * entropy


class Encoder(Lit):
    """nn.TransformerEncoder with a padding mask."""

    kind = "tokens"
    heads = 2

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, self.heads, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch):
        ids = batch["input_ids"]
        padding = torch.zeros_like(ids, dtype=torch.bool)
        padding[:, -1] = True
        x = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
