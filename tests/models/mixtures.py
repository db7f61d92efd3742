"""Mixture-of-experts models: of transformers, and hand-written."""

import torch
from torch import nn
from torch.nn import functional as F

from models.hand_written import VOCABULARY, WIDTH, Lit
from models.hugging_face import Causal


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
    """Of transformers' mixtures; one shared expert where there are any, and a divisible number of heads."""
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
    """More experts than are chosen: one that no token chose has no gradient, and its momentum stays."""

    skips = True

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.moe = LoopedExperts(16)
            layer.moe.skips = self.skips


class FewTokensForAll(FewTokens):
    """All experts are called, also with no rows: one that no token chose has a gradient of zeros."""

    skips = False


class Routed(nn.Module):
    """Branches on how many samples take each of two linears."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.kinds = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        left = self.router(x).squeeze(-1) > 0
        order = left.int().argsort(descending=True, stable=True)
        sizes = torch.stack([left.sum(), (~left).sum()]).tolist()
        parts = [linear(part) for linear, part in zip(self.kinds, x[order].split(sizes), strict=True)]
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
