"""Hand-written units as users write them, each with its own arrangement of features: `BLOCKS[name]`."""

import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, HIDDEN = 32, 4, 48
HEAD_DIM = WIDTH // HEADS


class FusedAttention(nn.Module):
    """One projection for queries, keys and values, and sizes of the full module."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GroupedQueries(nn.Module):
    """Fewer key heads than query heads, norms on heads, and a gated MLP."""

    def __init__(self, num_kv_heads, norm=False):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, num_kv_heads, HEAD_DIM
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, num_kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, num_kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM) if norm else nn.Identity()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x, cos=None):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if cos is not None:
            q, k = q * cos, k * cos
        repeats = self.num_heads // self.num_kv_heads
        k, v = (t[:, :, None].expand(B, self.num_kv_heads, repeats, T, self.head_dim) for t in (k, v))
        k, v = (t.reshape(B, self.num_heads, T, self.head_dim) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        x = x + self.o_proj(y)
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class BiasedAttention(nn.Module):
    """A bias for each head: from outside, and a learned one that is made inside."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.own = nn.Embedding(8, HEADS)

    def forward(self, x, position_bias=None):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, -1, HEADS, HEAD_DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
        distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).abs().clamp(max=7)
        own = self.own(distance).permute(2, 0, 1)[None]
        scores = q @ k.transpose(-1, -2)
        scores += own if position_bias is None else own + position_bias
        y = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        return self.o(y.transpose(1, 2).reshape(B, -1, WIDTH)), own


class Slopes(nn.Module):
    """ALiBi: a slope for each head, in a buffer."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", torch.tensor([2.0**-k for k in range(HEADS)]).view(1, HEADS, 1, 1))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        away = torch.arange(T) - torch.arange(T)[:, None]
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // self.num_heads) + self.slopes * away
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class MergedHeads(nn.Module):
    """Batch and heads in one dim, slopes that come from outside like that, and attention weights that are returned."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, slopes):
        B, T, _ = x.shape
        q, k, v = self.query_key_value(x).view(B, T, self.num_heads, 3, HEAD_DIM).unbind(3)
        q, k, v = (t.transpose(1, 2).reshape(B * self.num_heads, -1, HEAD_DIM) for t in (q, k, v))
        weights = slopes.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=HEAD_DIM**-0.5).softmax(-1)
        y = (weights @ v).view(B, self.num_heads, T, HEAD_DIM).transpose(1, 2).reshape(B, T, self.num_heads * HEAD_DIM)
        return self.dense(y), weights.view(B, self.num_heads, T, T)


class Interleaved(nn.Module):
    """Queries, keys and values of one head next to each other."""

    def __init__(self):
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.query_key_value(x).view(B, T, HEADS, 3 * HEAD_DIM).transpose(1, 2).chunk(3, -1)
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class Offsets(nn.Module):
    """One projection with pieces of unequal length, sliced at absolute offsets."""

    def __init__(self, num_kv_heads=2):
        super().__init__()
        self.kv = num_kv_heads
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * num_kv_heads) * HEAD_DIM)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv, end = self.qkv_proj(x), HEADS * HEAD_DIM
        middle = end + self.kv * HEAD_DIM
        q, k, v = qkv[..., :end], qkv[..., end:middle], qkv[..., middle:]
        q, k, v = (t.view(*x.shape[:-1], -1, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class FusedGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up * self.scale)


class Parallel(nn.Module):
    """Attention and MLP side by side, from one projection and into one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH + HIDDEN), nn.Linear(WIDTH + HIDDEN, WIDTH)

    def forward(self, x):
        B, T, _ = x.shape
        qkv, mlp = torch.split(self.into(self.norm(x)), [3 * WIDTH, HIDDEN], dim=-1)
        q, k, v = qkv.view(B, T, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, WIDTH)
        return x + self.out(torch.cat((y, F.gelu(mlp)), 2))


class Adapted(nn.Module):
    """Low-rank adapters beside a frozen linear."""

    def __init__(self):
        super().__init__()
        self.up, self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, 4), nn.Linear(4, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.up.requires_grad_(False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x) + self.b(self.a(x))))


class Bottleneck(nn.Module):
    """Pointwise convolutions around a grouped one, with norms over channels."""

    def __init__(self, norm):
        super().__init__()
        self.expand, self.n1 = nn.Conv2d(8, 16, 1, bias=False), norm(16)
        self.depthwise, self.n2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), norm(16)
        self.act, self.project, self.n3 = nn.PReLU(16), nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        h = F.relu(self.n1(self.expand(x)))
        return x + self.n3(self.project(self.act(self.n2(self.depthwise(h)))))


class SqueezeAndExcite(nn.Module):
    """Channels are weighted by a function of their means over all positions."""

    def __init__(self):
        super().__init__()
        self.expand, self.n1 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 8, 1)

    def forward(self, x):
        h = F.relu(self.n1(self.expand(x)))
        weights = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))).sigmoid()
        return x + self.project(h * weights)


class LoneFirst(nn.Module):
    """A linear without a partner before an MLP; its output cannot be cut."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ManualCasts(nn.Module):
    """In another dtype than float32 it runs only if casts are intercepted."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)).to(torch.float32))


class Convolutions(nn.Module):
    """General convolutions, and a linear that reads flattened channels."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, stride=2)
        self.c3, self.head = nn.Conv2d(8, 4, 3, padding_mode="circular", padding=1), nn.Linear(4 * 9, 6)

    def forward(self, x):
        return self.head(F.relu(self.c3(self.c2(F.relu(self.c1(x))))).reshape(x.shape[0], 4 * 9))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` with masks, and the weights that it shows."""

    def __init__(self, **options):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, 0.1, **options)

    def forward(self, x):
        h = self.norm(x)
        T = x.shape[1 if self.attn.batch_first else 0]
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        y, weights = self.attn(h, h, h, attn_mask=mask)
        return x + y, weights


class CrossAttention(nn.Module):
    """Keys and values of other widths, per-head mask, padding, no weights shown."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(
            WIDTH, HEADS, kdim=12, vdim=20, batch_first=True, add_bias_kv=True, add_zero_attn=True
        )

    def forward(self, x, key, value, padding):
        mask = torch.linspace(-1, 1, key.shape[1]).repeat(x.shape[0] * HEADS, x.shape[1], 1)
        mask = mask * torch.arange(1, len(mask) + 1)[:, None, None]
        padding = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -9.0)
        return self.attn(x, key, value, padding, False, mask.to(x.dtype))[0]


class ReadTwice(nn.Module):
    """One norm, on the local heads and outside of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.up(self.norm(x)).unflatten(-1, (2, 8))
        return self.down(self.norm(h).flatten(-2))


class AcrossFeatures(nn.Module):
    """A norm over all features of the middle: cutting them is wrong, and only gathering is right."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


class Tied(nn.Module):
    """A weight that two linears share."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) + self.b(torch.tanh(self.a(x)))


def tokens(batch=2, length=10, width=WIDTH):
    return torch.randn(batch, length, width, requires_grad=True)


def images(channels, size=7):
    return torch.randn(2, channels, size, size, requires_grad=True)


BLOCKS = {
    "fused": lambda: (Block(FusedAttention()), (tokens(),)),
    "fused, as many positions as features": lambda: (Block(FusedAttention()), (tokens(2, WIDTH),)),
    "grouped queries": lambda: (GroupedQueries(2), (tokens(), torch.randn(10, HEAD_DIM))),
    "one key head": lambda: (GroupedQueries(1), (tokens(),)),
    "norm on heads": lambda: (GroupedQueries(HEADS, norm=True), (tokens(),)),
    "bias": lambda: (BiasedAttention(), (tokens(), torch.randn(1, HEADS, 10, 10, requires_grad=True))),
    "own bias": lambda: (BiasedAttention(), (tokens(),)),
    "slopes": lambda: (Slopes(), (tokens(),)),
    "merged heads": lambda: (MergedHeads(), (tokens(), torch.randn(2 * HEADS, 1, 10, requires_grad=True))),
    "interleaved": lambda: (Interleaved(), (tokens(),)),
    "offsets": lambda: (Offsets(), (tokens(),)),
    "offsets, one key head": lambda: (Offsets(1), (tokens(),)),
    "mlp": lambda: (nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 6)), (tokens(),)),
    "mlp of three": lambda: (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4)),
        (tokens(3, 5, 8),),
    ),
    "fused gate": lambda: (FusedGate(), (tokens(),)),
    "parallel": lambda: (Parallel(), (tokens(),)),
    "adapted": lambda: (Adapted(), (tokens(),)),
    "batch norm": lambda: (Bottleneck(nn.BatchNorm2d), (images(8),)),
    "group norm": lambda: (Bottleneck(lambda channels: nn.GroupNorm(4, channels)), (images(8),)),
    "squeeze and excite": lambda: (SqueezeAndExcite(), (images(8),)),
    "lone linear before a pair": lambda: (LoneFirst(), (tokens(),)),
    "manual casts": lambda: (ManualCasts(), (tokens(),)),
    "convolutions": lambda: (Convolutions(), (images(3),)),
    "transposed": lambda: (
        nn.Sequential(nn.ConvTranspose1d(8, 16, 2, stride=2), nn.ReLU(), nn.ConvTranspose1d(16, 4, 3)),
        (torch.randn(2, 8, 7, requires_grad=True),),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True), (tokens(),)),
    "decoder layer": lambda: (nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN), (tokens(), tokens(4, 10))),
    "attention": lambda: (SelfAttention(batch_first=True), (tokens(),)),
    "attention, sequence first": lambda: (SelfAttention(bias=False), (tokens(),)),
    "cross attention": lambda: (
        CrossAttention(),
        (tokens(), tokens(2, 6, 12), tokens(2, 6, 20), torch.arange(12).view(2, 6) % 5 == 4),
    ),
    "read twice": lambda: (ReadTwice(), (tokens(2, 5, 8),)),
    "across features": lambda: (AcrossFeatures(), (tokens(),)),
    "tied": lambda: (Tied(), (tokens(),)),
    "lone linear": lambda: (nn.Linear(WIDTH, 8), (tokens(),)),
}
