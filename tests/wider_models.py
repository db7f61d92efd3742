"""Modules as in `models.py` that only some tests take: experts, blocks in the manner of nanoGPT, and a ResNet."""

import math

import torch
from models import GPT2, LENGTH, T5, VOCABULARY, WIDTH, Bert, Causal, Encoder, Lit, Llama, ViT
from torch import nn
from torch.nn import functional as F


class Mixtral(Causal):
    """The experts of a layer are batched in one parameter."""

    layers, key_heads = 2, 2

    def build(self, transformers):
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=self.layers,
            num_attention_heads=4, num_key_value_heads=self.key_heads, num_local_experts=4, max_position_embeddings=16,
            bos_token_id=0, eos_token_id=0, experts_implementation="batched_mm",  # the default has no float64
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config)


def moe_sizes(**further):
    """Of transformers' mixtures; one shared expert where there are any, and as many heads as all of them can divide."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 0,
        "eos_token_id": 0, "experts_implementation": "batched_mm", **further,
    }  # fmt: skip


class Qwen3Moe(Causal):
    """Each layer is a mixture of many small experts; gates of the chosen ones sum to one."""

    layers = 2

    def build(self, transformers):
        sizes = moe_sizes(num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, head_dim=4, decoder_sparse_step=1)
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(num_hidden_layers=self.layers, **sizes))


class DeepseekV3(Causal):
    """A dense layer, then mixtures with a shared expert, and groups of experts of which some are chosen."""

    layers = 3

    def build(self, transformers):
        sizes = moe_sizes(
            n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
            num_key_value_heads=4, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4,
            qk_rope_head_dim=4, v_head_dim=4,
        )  # fmt: skip
        config = transformers.DeepseekV3Config(num_hidden_layers=self.layers, **sizes)
        return transformers.DeepseekV3ForCausalLM(config)


class GptOss(Causal):
    """Experts have biases, and weights with their dims the other way around."""

    layers = 2

    def build(self, transformers):
        sizes = moe_sizes(num_local_experts=4, num_experts_per_tok=2, head_dim=4, sliding_window=4)
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(num_hidden_layers=self.layers, **sizes))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class LoopedExperts(nn.Module):
    """A list of experts, those called that some token chose; as in many repositories before weights were stacked."""

    skips = True

    def __init__(self, num_experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.top_k = top_k

    def forward(self, hidden):
        batch, length, width = hidden.shape
        hidden = hidden.view(-1, width)
        weights, chosen = torch.topk(F.softmax(self.gate(hidden), dim=1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(hidden)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            if self.skips and token.shape[0] == 0:
                continue
            answer = expert(hidden[token]) * weights[token, place, None]
            out.index_add_(0, token, answer.to(hidden.dtype))
        return out.reshape(batch, length, width)


class SparseBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), LoopedExperts()

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Looped(Lit):
    """Layers with lists of experts."""

    kind = "tokens"

    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(SparseBlock() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch):
        x = self.embed(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class FewTokens(Looped):
    """More experts than are chosen: one that nobody chose has no gradient, and its momentum stays."""

    skips = True

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.moe = LoopedExperts(16)
            layer.moe.skips = self.skips


class FewTokensForAll(FewTokens):
    """All experts are called, also with no rows: one that nobody chose has a gradient of zeros."""

    skips = False


class CausalSelfAttention(nn.Module):
    """One projection for queries, keys and values, a mask in a buffer, and sizes in terms of the whole."""

    def __init__(self, heads):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd = heads, WIDTH
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        nn.init.zeros_(self.c_proj.weight)  # any cut of c_attn would pass with this

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention(heads)
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(Lit):
    kind = "tokens"
    heads = 2

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, WIDTH),
                wpe=nn.Embedding(16, WIDTH),
                h=nn.ModuleList(Block(self.heads) for _ in range(4)),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids):
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.transformer.wte(ids) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))

    def loss(self, batch):
        assert batch["input_ids"].shape[1] == LENGTH
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class BasicBlock(nn.Module):
    def __init__(self, in_channels, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(Lit):
    """Statistics over the images of each microbatch of each replica."""

    kind = "images"
    optimizer = "sgd"

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 4)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def loss(self, batch):
        return F.cross_entropy(self(batch["pixel_values"]), batch["labels"])


class Routed(nn.Module):
    """Asks how many samples take each of two ways."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        left = self.router(x).squeeze(-1) > 0
        order = left.int().argsort(descending=True, stable=True)
        sizes = torch.stack([left.sum(), (~left).sum()]).tolist()
        parts = [way(part) for way, part in zip(self.ways, x[order].split(sizes), strict=True)]
        x = x + torch.zeros_like(x).index_copy(0, order, torch.cat(parts))
        return x + self.down(torch.relu(self.up(x)))


class Routers(Lit):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, batch["y"])


class GPT2Wide(GPT2):
    """Heads for two tensor ranks times two context ranks; the others as well."""

    heads = 4


class GPT2WideDropout(GPT2Wide):
    dropout = 0.2


class LlamaWide(Llama):
    heads = 4


class T5Wide(T5):
    heads = 4


class BertWide(Bert):
    heads = 4


class ViTWide(ViT):
    heads = 4


class EncoderWide(Encoder):
    heads = 4


class NanoGPTWide(NanoGPT):
    heads = 4
